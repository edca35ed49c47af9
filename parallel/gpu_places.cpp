#include "parallel/gpu_places.h"

#include <algorithm>
#include <map>
#include <set>

#include "kernels/device.h"
#include "parallel/agreement.h"

namespace palimpsest {

void check_one_gpu_each(const std::vector<GpuPlace>& ranks) {
  struct Host {
    int64_t ranks = 0, visible = 0;
    std::set<std::string> gpus;
  };
  std::map<std::string, Host> hosts;
  for (const GpuPlace& place : ranks) {
    Host& host = hosts[place.host];
    host.ranks += 1;
    host.visible = std::max(host.visible, place.visible);
    host.gpus.insert(place.gpu);
  }
  for (const auto& [name, host] : hosts) {
    const auto taken = static_cast<int64_t>(host.gpus.size());
    if (taken < host.ranks)
      throw_user_error(host.ranks, " ranks on ", name, " but ", std::max(taken, host.visible),
                       " GPUs visible, and ranks cannot share a GPU; start at most one rank a GPU, or take device=cpu");
  }
}

std::string take_gpu(Communicator& world, int64_t local_rank, const GpuLinks& links) {
  std::string gpu;
  agree(world, [&] {
    use_gpu(local_rank);
    gpu = gpu_properties().bus_id;
  });
  const std::vector<std::string> hosts = gather_texts(world, host_name()), gpus = gather_texts(world, gpu);
  const std::vector<std::string> visible = gather_texts(world, std::to_string(num_gpus()));
  std::vector<GpuPlace> places;
  for (size_t i = 0; i < hosts.size(); ++i) places.push_back({hosts[i], gpus[i], std::stoll(visible[i])});
  agree(world, [&] {
    if (!links.share_gpus) check_one_gpu_each(places);
  });
  return gpu;
}

}  // namespace palimpsest
