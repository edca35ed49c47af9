#include "model/mixers.h"

#include "kernels/check.h"
#include "model/attention.h"
#include "model/gated_deltanet.h"
#include "model/kda.h"
#include "model/mla.h"
#include "model/retnet.h"

namespace palimpsest {

namespace {

using MakeMixer = std::unique_ptr<TokenMixer> (*)(const ModelConfig&, const std::string&, ParameterRegistry&);

template <class Mixer>
std::unique_ptr<TokenMixer> make(const ModelConfig& config, const std::string& prefix, ParameterRegistry& registry) {
  return std::make_unique<Mixer>(config, prefix, registry);
}

struct MixerKind {
  const char* name;
  MakeMixer make;
};

constexpr MixerKind kMixers[] = {
    {"kda", make_kda},       {"gdn", make_gated_deltanet}, {"mla", make<Mla>}, {"attention", make<Attention>},
    {"retnet", make_retnet},
};

const MixerKind& mixer_named(const std::string& kind) {
  for (const MixerKind& mixer : kMixers)
    if (kind == mixer.name) return mixer;
  std::string known;
  for (const std::string& name : mixer_kinds()) known.append(known.empty() ? "" : ", ").append(name);
  throw_user_error("model.layers: '", kind, "' is no token mixer; known are ", known);
}

}  // namespace

std::vector<std::string> mixer_kinds() {
  std::vector<std::string> names;
  for (const MixerKind& mixer : kMixers) names.emplace_back(mixer.name);
  return names;
}

void check_mixer_kind(const std::string& kind) {
  mixer_named(kind);
}

std::unique_ptr<TokenMixer> make_mixer(const std::string& kind, const ModelConfig& config, const std::string& prefix,
                                       ParameterRegistry& registry) {
  return mixer_named(kind).make(config, prefix, registry);
}

}  // namespace palimpsest
