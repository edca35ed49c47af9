// A mesh for rehearsals: this process stands for one rank of a job that does not exist. Its groups count bytes on
// planning streams and cannot send any.
#pragma once

#include <memory>

#include "parallel/mesh.h"

namespace palimpsest {

// rank: of the world, 0 <= rank < shape.ranks().
std::unique_ptr<Mesh> planned_mesh(const MeshShape& shape, int64_t rank);

}  // namespace palimpsest
