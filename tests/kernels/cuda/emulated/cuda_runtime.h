// The types of CUDA's runtime that declarations name.
#pragma once

using cudaError_t = int;
using cudaStream_t = void*;
