#include "launch/ranks.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "parallel/agreement.h"
#include "parallel/gpu_places.h"

namespace palimpsest {

Ranks::Ranks(int* argc, char*** argv) {
  if (!started_by_launcher()) return;  // one rank needs no MPI and none of the time it takes to start
  session_.emplace(argc, argv);
  if (size() == 1) return;
  start_watchdog_.emplace(rank(), ParallelConfig().timeout_s);
  start_mesh_ = session_->make_mesh({.data = size()}, *start_watchdog_);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) omp_set_num_threads(static_cast<int>(session_->fair_threads()));
}

const Mesh& Ranks::lay_out(const Config& config, Console& console) {
  const ParallelConfig& parallel = config.parallel;
  MeshShape shape = {.data = parallel.data,
                     .sequence = parallel.sequence,
                     .tensor = parallel.tensor,
                     .layout = parallel.sequence_layout};
  agree(world(), [&] { shape = resolve_mesh(shape, size()); });
  if (size() == 1) return Mesh::single();
  const Device device = device_of(config);
  GpuLinks links;
  agree(world(), [&] { links = gpu_links(); });
  check_same_on_ranks(world(), {{"PALIMPSEST_SHARE_GPUS", std::to_string(links.share_gpus ? 1 : 0)},
                                {"PALIMPSEST_LEAST_COPIED_BYTES", std::to_string(links.least_copied_bytes)}});
  const std::string gpu = device == Device::kCuda ? take_gpu(world(), session_->local_rank(), links) : "none";
  watchdog_.emplace(rank(), parallel.timeout_s);
  mesh_ = session_->make_mesh(shape, *watchdog_, device, links);
  console.info(map_of_ranks(*mesh_, gpu));
  for (const std::string& notice : mesh_->notices()) console.info(notice);
  return *mesh_;
}

std::string Ranks::map_of_ranks(const Mesh& mesh, const std::string& gpu) const {
  const std::vector<std::string> hosts = gather_texts(mesh.world(), host_name());
  const std::vector<std::string> places = gather_texts(
      mesh.world(), fmt::format("{:>5}  {:>7}  {:>4}  {:>8}  {:>6}  {}", session_->local_rank(), omp_get_max_threads(),
                                mesh.data().rank(), mesh.sequence().rank(), mesh.tensor().rank(), gpu));
  size_t width = 4;
  for (const std::string& host : hosts) width = std::max(width, host.size());
  const MeshShape& shape = mesh.shape();
  std::string text = fmt::format(
      "{} ranks: data {} x sequence {} x tensor {}\n   rank  {:<{}}  {:>5}  {:>7}  {:>4}  {:>8}  {:>6}  GPU\n",
      shape.ranks(), shape.data, shape.sequence, shape.tensor, "host", width, "local", "threads", "data", "sequence",
      "tensor");
  for (size_t i = 0; i < hosts.size(); ++i) text += fmt::format("  {:>5}  {:<{}}  {}\n", i, hosts[i], width, places[i]);
  text.pop_back();
  return text;
}

}  // namespace palimpsest
