#include "parallel/mesh.h"

#include <array>
#include <exception>
#include <utility>

namespace palimpsest {

MeshShape resolve_mesh(const MeshShape& wanted, int64_t ranks) {
  std::array<int64_t, 3> sizes = {wanted.data, wanted.sequence, wanted.tensor};
  const std::string text = "parallel: data = " + std::to_string(wanted.data) +
                           ", sequence = " + std::to_string(wanted.sequence) +
                           ", tensor = " + std::to_string(wanted.tensor) + " on " + std::to_string(ranks) + " ranks";
  int64_t* open = nullptr;
  int64_t product = 1;
  for (int64_t& size : sizes) {
    if (size == -1) {
      if (open) throw_user_error(text, ": only one of them may be -1");
      open = &size;
    } else if (size < 1) {
      throw_user_error(text, ": each must be at least 1, or -1 for what the others leave");
    } else {
      product *= size;
    }
  }
  if (open && ranks % product == 0) *open = ranks / product;
  const MeshShape shape = {.data = sizes[0], .sequence = sizes[1], .tensor = sizes[2], .layout = wanted.layout};
  if ((open && *open < 1) || shape.ranks() != ranks)
    throw_user_error(text, ": the product of ", open ? "the other two, " : "the three, ", product, ", must ",
                     open ? "divide" : "be", " the number of ranks");
  return shape;
}

const Mesh& Mesh::single() {
  static const Mesh mesh({}, std::make_unique<Communicator>("world"), std::make_unique<Communicator>("data"),
                         std::make_unique<Communicator>("sequence"), std::make_unique<Communicator>("tensor"),
                         std::make_unique<Communicator>("replica"));
  return mesh;
}

Mesh::Mesh(const MeshShape& shape, std::unique_ptr<Communicator> world, std::unique_ptr<Communicator> data,
           std::unique_ptr<Communicator> sequence, std::unique_ptr<Communicator> tensor,
           std::unique_ptr<Communicator> replica)
    : shape_(shape),
      world_(std::move(world)),
      data_(std::move(data)),
      sequence_(std::move(sequence)),
      tensor_(std::move(tensor)),
      replica_(std::move(replica)) {
  CHECK(world_->size() == shape.ranks() && data_->size() == shape.data && sequence_->size() == shape.sequence &&
            tensor_->size() == shape.tensor && replica_->size() == shape.data * shape.sequence,
        "the communicators do not fit the mesh");
}

SentBytes Mesh::bytes_sent() const {
  return {.world = world_->bytes_sent(),
          .replica = replica_->bytes_sent(),
          .data = data_->bytes_sent(),
          .sequence = sequence_->bytes_sent(),
          .tensor = tensor_->bytes_sent()};
}

SentBytes& SentBytes::operator+=(const SentBytes& other) {
  world += other.world;
  replica += other.replica;
  data += other.data;
  sequence += other.sequence;
  tensor += other.tensor;
  return *this;
}

SentBytes SentBytes::operator*(int64_t times) const {
  return {.world = world * times,
          .replica = replica * times,
          .data = data * times,
          .sequence = sequence * times,
          .tensor = tensor * times};
}

SentBytes SentBytes::operator/(int64_t parts) const {
  return {.world = world / parts,
          .replica = replica / parts,
          .data = data / parts,
          .sequence = sequence / parts,
          .tensor = tensor / parts};
}

SentBytes SentBytes::operator-(const SentBytes& other) const {
  SentBytes difference = *this;
  difference += other * -1;
  return difference;
}

int64_t Mesh::workspace_bytes() const {
  int64_t bytes = 0;
  for_each_communicator([&](const Communicator& communicator) { bytes += communicator.workspace_bytes(); });
  return bytes;
}

std::vector<std::string> Mesh::notices() const {
  std::vector<std::string> notices;
  for_each_communicator([&](const Communicator& communicator) {
    if (std::string notice = communicator.notice(); !notice.empty()) notices.push_back(std::move(notice));
  });
  return notices;
}

SharedMemory::SharedMemory(const Mesh& mesh) : mesh_(mesh), exceptions_(std::uncaught_exceptions()) {
  mesh.for_each_communicator([](Communicator& communicator) { communicator.take_workspace(); });
}

SharedMemory::~SharedMemory() {
  if (std::uncaught_exceptions() > exceptions_) return;
  mesh_.for_each_communicator([](Communicator& communicator) { communicator.leave_others_memory(); });
}

SequenceCut cut_rows(const Mesh& mesh, int64_t num_rows, int64_t row_length) {
  return SequenceCut::even(num_rows, row_length, mesh.shape().sequence, mesh.shape().layout);
}

}  // namespace palimpsest
