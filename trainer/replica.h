// What the ranks of a replica group (data x sequence) do together in a step: each has the gradient of its own tokens,
// and each updates a shard of the rows of every parameter (zero: 1).
#pragma once

#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

// Leaves in the shard's rows of every gradient the sum over the replica group, completed over the tensor ranks that
// hold copies. The other rows keep what this rank alone had.
void reduce_gradients(Context& context, ParameterRegistry& registry);

// Every rank's rows of every value to all ranks of the replica group.
void gather_values(Context& context, ParameterRegistry& registry);

// Whether this rank's shard of the parameter counts in sums over all ranks (each element once, though copies hold it).
bool counts_in_sums(const TensorShare& share, const Parameter& parameter);
bool counts_in_sums(const Context& context, const Parameter& parameter);

}  // namespace palimpsest
