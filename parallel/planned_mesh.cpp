#include "parallel/planned_mesh.h"

#include <string>
#include <utility>

namespace palimpsest {

namespace {

class PlannedCommunicator : public Communicator {
 public:
  PlannedCommunicator(std::string axis, int64_t rank, int64_t size) : Communicator(std::move(axis), rank, size) {}

 protected:
  std::unique_ptr<Pending> launch_all_reduce(Stream&, std::span<const Tensor>, ReduceOp) override { return refuse(); }
  std::unique_ptr<Pending> launch_all_gather(Stream&, std::span<const Parts>) override { return refuse(); }
  std::unique_ptr<Pending> launch_reduce_scatter(Stream&, std::span<const Parts>) override { return refuse(); }
  std::unique_ptr<Pending> launch_broadcast(Stream&, const Tensor&, int64_t) override { return refuse(); }
  std::unique_ptr<Pending> launch_send_receive(Stream&, const Tensor&, int64_t, const Tensor&, int64_t) override {
    return refuse();
  }
  std::unique_ptr<Pending> launch_barrier(Stream&) override { return refuse(); }

 private:
  std::unique_ptr<Pending> refuse() const {
    CHECK(false, "the planned group of axis ", axis(), " has nobody to send to");
    return nullptr;
  }
};

}  // namespace

std::unique_ptr<Mesh> planned_mesh(const MeshShape& shape, int64_t rank) {
  CHECK(rank >= 0 && rank < shape.ranks(), "rank ", rank, " of ", shape.ranks());
  const int64_t tensor = rank % shape.tensor, sequence = rank / shape.tensor % shape.sequence;
  const int64_t data = rank / shape.tensor / shape.sequence;
  const auto group = [](const char* axis, int64_t own, int64_t size) {
    return std::make_unique<PlannedCommunicator>(axis, own, size);
  };
  return std::make_unique<Mesh>(shape, group("world", rank, shape.ranks()), group("data", data, shape.data),
                                group("sequence", sequence, shape.sequence), group("tensor", tensor, shape.tensor),
                                group("replica", rank / shape.tensor, shape.data * shape.sequence));
}

}  // namespace palimpsest
