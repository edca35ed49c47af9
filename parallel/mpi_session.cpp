#include "parallel/mpi_session.h"

#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "parallel/agreement.h"
#include "parallel/mpi_communicator.h"
#include "parallel/nccl_communicator.h"

namespace palimpsest {

namespace {

// Returns when every rank of the world is here. Blocking calls of MPI keep a core busy that a rank which is still on
// its way may need.
void await_all_ranks(Watchdog& watchdog) {
  constexpr std::chrono::milliseconds kNap{1};
  const std::string world = "world";
  const Watchdog::Guard guard(watchdog, "barrier", world);
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, &request), "MPI_Ibarrier");
  for (int done = 0;;) {
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done != 0) return;
    std::this_thread::sleep_for(kNap);
  }
}

}  // namespace

MpiSession::MpiSession(int* argc, char*** argv) {
  int provided = 0;
  check_mpi(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
  int rank = 0, size = 1;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  world_rank_ = rank;
  world_size_ = size;
  look_around_host();
}

MpiSession::~MpiSession() {
  MPI_Finalize();
}

std::unique_ptr<Mesh> MpiSession::make_mesh(const MeshShape& shape, Watchdog& watchdog, Device device,
                                            const GpuLinks& links) const {
  await_all_ranks(watchdog);
  const int64_t rank = world_rank_;
  const bool member = rank < shape.ranks();
  const int64_t tensor_rank = rank % shape.tensor;
  const int64_t sequence_rank = rank / shape.tensor % shape.sequence;
  const int64_t data_rank = rank / shape.tensor / shape.sequence;
  // Ranks of one colour form a group, in order of their world ranks.
  const auto split = [&](const char* axis, int64_t colour) -> std::unique_ptr<Communicator> {
    MPI_Comm comm = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(MPI_COMM_WORLD, member ? static_cast<int>(colour) : MPI_UNDEFINED, static_cast<int>(rank),
                             &comm),
              "MPI_Comm_split");
    if (!member) return nullptr;
    int size = 1;
    check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    if (device == Device::kCuda && size > 1) return make_nccl_communicator(axis, comm, watchdog, links);
    return std::make_unique<MpiCommunicator>(axis, comm, watchdog);
  };
  auto world = split("world", 0);
  auto data = split("data", sequence_rank * shape.tensor + tensor_rank);
  auto sequence = split("sequence", data_rank * shape.tensor + tensor_rank);
  auto tensor = split("tensor", data_rank * shape.sequence + sequence_rank);
  auto replica = split("replica", tensor_rank);
  if (!member) return nullptr;
  return std::make_unique<Mesh>(shape, std::move(world), std::move(data), std::move(sequence), std::move(tensor),
                                std::move(replica));
}

void MpiSession::look_around_host() {
  MPI_Comm host = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host), "MPI_Comm_split_type");
  int rank = 0, size = 1;
  check_mpi(MPI_Comm_rank(host, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(host, &size), "MPI_Comm_size");
  local_rank_ = rank;
  // Launchers bind ranks to processors of their own, or leave several with the same set.
  cpu_set_t mine;
  CPU_ZERO(&mine);
  CHECK(sched_getaffinity(0, sizeof(mine), &mine) == 0, "sched_getaffinity: ", std::strerror(errno));
  std::vector<cpu_set_t> all(static_cast<size_t>(size));
  check_mpi(MPI_Allgather(&mine, sizeof(mine), MPI_BYTE, all.data(), sizeof(mine), MPI_BYTE, host), "MPI_Allgather");
  check_mpi(MPI_Comm_free(&host), "MPI_Comm_free");
  const auto sharing =
      std::count_if(all.begin(), all.end(), [&](const cpu_set_t& other) { return CPU_EQUAL(&other, &mine); });
  fair_threads_ = std::max<int64_t>(CPU_COUNT(&mine) / std::max<int64_t>(sharing, 1), 1);
}

void fail_job(int64_t rank, const std::exception& error) {
  const int status = dynamic_cast<const UserError*>(&error) != nullptr ? kStatusUserError : kStatusRankFailed;
  std::fprintf(stderr, "error: rank %ld on %s: %s\n", static_cast<long>(rank), host_name().c_str(), error.what());
  std::fflush(stderr);
  std::thread([status] {
    constexpr auto kPatience = std::chrono::seconds(5);
    std::this_thread::sleep_for(kPatience);
    std::_Exit(status);  // MPI_Abort can hang in a network that is gone
  }).detach();
  MPI_Abort(MPI_COMM_WORLD, status);
  std::_Exit(status);
}

void run_together(const Communicator& world, const std::function<void()>& body) {
  try {
    body();
  } catch (const ThrownByAll&) {
    throw;
  } catch (const std::exception& error) {
    if (world.size() > 1) fail_job(world.rank(), error);
    throw;
  }
}

bool started_by_launcher() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK"})
    if (std::getenv(name) != nullptr) return true;
  return false;
}

std::string mpi_library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string version(text, static_cast<size_t>(length));
  return version.substr(0, version.find(','));
}

}  // namespace palimpsest
