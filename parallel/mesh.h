// The device mesh: world = data x sequence x tensor. Tensor ranks are adjacent, then sequence, then data:
//   world rank = (data_rank * sequence + sequence_rank) * tensor + tensor_rank
// `replica` = data x sequence is the group over which weights are replicated and gradients summed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/sequence_cut.h"

namespace palimpsest {

struct MeshShape {
  int64_t data = 1, sequence = 1, tensor = 1;
  SequenceLayout layout = SequenceLayout::kContiguous;  // of the sequence ranks' tokens
  int64_t ranks() const { return data * sequence * tensor; }
};

// Replaces the one entry that may be -1 by what the others leave of `ranks`. Throws a UserError that prints every
// number when the product is not the number of ranks.
MeshShape resolve_mesh(const MeshShape& wanted, int64_t ranks);

// Bytes that a rank has sent, by the axis of the collective; see Communicator::bytes_sent.
struct SentBytes {
  int64_t world = 0, replica = 0, data = 0, sequence = 0, tensor = 0;
  SentBytes& operator+=(const SentBytes& other);
  SentBytes operator-(const SentBytes& other) const;
  SentBytes operator*(int64_t times) const;
  SentBytes operator/(int64_t parts) const;
  // body("tensor", bytes) for each axis on which something was sent.
  template <class Body>
  void for_each_axis(Body&& body) const {
    const auto pass = [&](const char* axis, int64_t bytes) {
      if (bytes > 0) body(axis, bytes);
    };
    pass("replica", replica);
    pass("data", data);
    pass("sequence", sequence);
    pass("tensor", tensor);
    pass("world", world);
  }
};

class Mesh {
 public:
  // This rank alone. Has no state that a use could change.
  static const Mesh& single();
  Mesh(const MeshShape& shape, std::unique_ptr<Communicator> world, std::unique_ptr<Communicator> data,
       std::unique_ptr<Communicator> sequence, std::unique_ptr<Communicator> tensor,
       std::unique_ptr<Communicator> replica);

  const MeshShape& shape() const { return shape_; }
  Communicator& world() const { return *world_; }
  Communicator& data() const { return *data_; }
  Communicator& sequence() const { return *sequence_; }
  Communicator& tensor() const { return *tensor_; }
  Communicator& replica() const { return *replica_; }

  SentBytes bytes_sent() const;  // so far, in rehearsals too

  int64_t workspace_bytes() const;           // of all its communicators
  std::vector<std::string> notices() const;  // of those that have one

  // body(communicator) for each, in the same order on all ranks.
  template <class Body>
  void for_each_communicator(Body&& body) const {
    for (Communicator* each : {world_.get(), data_.get(), sequence_.get(), tensor_.get(), replica_.get()}) body(*each);
  }

 private:
  MeshShape shape_;
  std::unique_ptr<Communicator> world_, data_, sequence_, tensor_, replica_;
};

// The time in which the ranks of a mesh work in each other's memory: from when all is rehearsed and all of them have
// allocated their tensors, until the first of them frees any. Every rank makes one, and none ends while something is
// under way. Where it ends by an exception the others are not waited for.
class SharedMemory {
 public:
  explicit SharedMemory(const Mesh& mesh);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

 private:
  const Mesh& mesh_;
  int exceptions_;  // on their way when it began
};

// How the mesh's sequence ranks share rows of this length.
SequenceCut cut_rows(const Mesh& mesh, int64_t num_rows, int64_t row_length);

}  // namespace palimpsest
