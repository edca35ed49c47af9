// kernels/cuda/sm90.cuh on the CPU: the same names, each instruction as its description says. This folder comes first
// in the include path of the programs that run kernels on the CPU.
#pragma once

#include <cuda_bf16.h>

#include "tests/kernels/cuda/emulated/block.h"

namespace palimpsest::cuda::sm90 {

using emulated::Block;

// ---- shared memory ----

inline uint32_t dynamic_shared() {
  return 0;
}
template <class T>
T* shared_pointer(uint32_t address) {
  return reinterpret_cast<T*>(Block::current().shared(address, sizeof(T), alignof(T)));
}

// ---- numbers ----

inline uint32_t pack_bf16(float low, float high) {
  return __float2bfloat16_rn(low).bits | static_cast<uint32_t>(__float2bfloat16_rn(high).bits) << 16;
}
inline float low_of(uint32_t packed) {
  return std::bit_cast<float>(packed << 16);
}
inline float high_of(uint32_t packed) {
  return std::bit_cast<float>(packed & 0xffff0000U);
}
inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38F ? 0.0F : y;
}
inline float log2_fast(float x) {
  return std::log2(x);
}
inline float reciprocal_fast(float x) {
  return 1.0F / x;
}
inline float reciprocal_root(float x) {
  return 1.0F / std::sqrt(x);
}
inline uint32_t to_tf32(float x) {
  return (std::bit_cast<uint32_t>(x) + 0x1000U) & 0xffffe000U;
}

// ---- groups of threads ----

inline int lane() {
  return Block::current().thread() % 32;
}
template <class Operand, class Compute>
void warp_together(Operand& operand, Compute compute) {
  constexpr int kWarpGroups = 100;  // after the numbered barriers of a block
  Block::current().together(kWarpGroups + Block::current().thread() / 32, 32, lane(), operand, compute);
}
inline void sync_threads(int barrier, int num_threads) {
  // Members are told apart by nothing but their number of arrival, so any will do.
  int nothing = 0;
  Block::current().together(barrier, num_threads, 0, nothing, [](const auto&) {});
}
inline void sync_block() {
  sync_threads(0, Block::current().num_threads());
}
inline void sync_warp() {
  int nothing = 0;
  warp_together(nothing, [](const auto&) {});
}
inline float exchange(float x, int lane_mask) {
  struct Operand {
    float give, take;
    int mask;
  } operand = {x, 0.0F, lane_mask};
  warp_together(operand, [](const auto& of) {
    for (int l = 0; l < 32; ++l) of(l).take = of(l ^ of(l).mask).give;
  });
  return operand.take;
}

// ---- products of one warp ----

inline float half_of(uint32_t packed, int i) {
  return i == 0 ? low_of(packed) : high_of(packed);
}

struct WarpProduct {
  float* d;
  uint32_t a[4], b[2];
};
inline void mma_k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  WarpProduct operand = {d, {a0, a1, a2, a3}, {b0, b1}};
  warp_together(operand, [](const auto& of) {
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = l % 4;
      for (int r = 0; r < 4; ++r)
        for (int i = 0; i < 2; ++i) a[g + r % 2 * 8][2 * t + i + r / 2 * 8] = half_of(of(l).a[r], i);
      for (int r = 0; r < 2; ++r)
        for (int i = 0; i < 2; ++i) b[2 * t + i + 8 * r][g] = half_of(of(l).b[r], i);
    }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) of(l).d[i] += a[l / 4 + i / 2 * 8][k] * b[k][l % 4 * 2 + i % 2];
  });
}
inline void mma_k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  mma_k16(d, a0, a1, 0, 0, b0, 0);
}
inline void mma_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  WarpProduct operand = {d, {a0, a1, a2, a3}, {b0, b1}};
  warp_together(operand, [](const auto& of) {
    float a[16][8], b[8][8];
    for (int l = 0; l < 32; ++l) {
      for (int r = 0; r < 4; ++r) a[l / 4 + r % 2 * 8][l % 4 + r / 2 * 4] = std::bit_cast<float>(of(l).a[r]);
      for (int r = 0; r < 2; ++r) b[l % 4 + 4 * r][l / 4] = std::bit_cast<float>(of(l).b[r]);
    }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 8; ++k) of(l).d[i] += a[l / 4 + i / 2 * 8][k] * b[k][l % 4 * 2 + i % 2];
  });
}

enum class Move : uint8_t { kLoad, kStore };
template <Move move, bool transposed>
void move_matrices(uint32_t (&r)[4], uint32_t address) {
  struct Operand {
    uint32_t* r;
    uint32_t address;
  } operand = {r, address};
  warp_together(operand, [](const auto& of) {
    for (int l = 0; l < 32; ++l) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t numbers[2];
        if constexpr (move == Move::kStore) std::memcpy(numbers, of(l).r + matrix, 4);
        for (int i = 0; i < 2; ++i) {
          const int row = transposed ? l % 4 * 2 + i : l / 4, column = transposed ? l / 4 : l % 4 * 2 + i;
          uint8_t* place = Block::current().shared(of(8 * matrix + row).address, 16, 16) + 2 * column;
          if constexpr (move == Move::kStore) {
            std::memcpy(place, numbers + i, 2);
          } else {
            std::memcpy(numbers + i, place, 2);
          }
        }
        if constexpr (move == Move::kLoad) std::memcpy(of(l).r + matrix, numbers, 4);
      }
    }
  });
}
inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  move_matrices<Move::kLoad, false>(r, address);
}
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  move_matrices<Move::kLoad, true>(r, address);
}
inline void store_matrices(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  uint32_t r[4] = {r0, r1, r2, r3};
  move_matrices<Move::kStore, false>(r, address);
}
inline void store_matrices_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  uint32_t r[4] = {r0, r1, r2, r3};
  move_matrices<Move::kStore, true>(r, address);
}

// ---- products of one warpgroup: done when asked for ----

inline uint64_t tile_descriptor(uint32_t address, uint32_t column_stride = 0) {
  return uint64_t{1024 >> 4} << 32 | uint64_t{column_stride >> 4} << 16 | (address & 0x3ffffU) >> 4;
}
enum class Major : int { kK = 0, kN = 1 };
inline void warpgroup_fence() {}
inline void warpgroup_commit() {}
template <int pending>
void warpgroup_wait() {}
template <int N>
void pin(float (&)[N][4]) {}

template <Major major, int sign, bool accumulate = true, int kTiles>
void warpgroup_product(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b) {
  struct Operand {
    float (*d)[4];
    const uint32_t* a;
    uint64_t b;
  } operand = {d, a, b};
  constexpr int kWarpgroups = 200;
  const int thread = Block::current().thread();
  Block::current().together(kWarpgroups + thread / 128, 128, thread % 128, operand, [](const auto& of) {
    std::vector<float> tile(16 * 8 * kTiles);
    const uint64_t descriptor = of(0).b;
    const auto field = [descriptor](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fffU) << 4; };
    for (uint32_t k = 0; k < 16; ++k) {
      for (uint32_t n = 0; n < 8 * kTiles; ++n) {
        uint32_t address = field(0);
        if constexpr (major == Major::kK) {
          address += n / 8 * field(32) + n % 8 * 128 + 2 * k;
        } else {
          address += n / 64 * field(16) + n % 64 * 2 + k / 8 * field(32) + k % 8 * 128;
        }
        address ^= (address >> 7 & 7U) << 4;
        tile[k * 8 * kTiles + n] = __bfloat162float(*shared_pointer<__nv_bfloat16>(address));
      }
    }
    float rows[64][16];
    for (int l = 0; l < 128; ++l) {
      CHECK(of(l).b == descriptor, "the threads of a warpgroup name different tiles");
      for (int r = 0; r < 4; ++r)
        for (int i = 0; i < 2; ++i)
          rows[l / 32 * 16 + l % 32 / 4 + r % 2 * 8][l % 4 * 2 + i + r / 2 * 8] = half_of(of(l).a[r], i);
    }
    for (int l = 0; l < 128; ++l) {
      for (int j = 0; j < kTiles; ++j) {
        for (int i = 0; i < 4; ++i) {
          const float* row = rows[l / 32 * 16 + l % 32 / 4 + i / 2 * 8];
          float sum = 0.0F;
          for (int k = 0; k < 16; ++k)
            sum += row[k] * tile[static_cast<size_t>(k * 8 * kTiles + 8 * j + l % 4 * 2 + i % 2)];
          of(l).d[j][i] = (accumulate ? of(l).d[j][i] : 0.0F) + static_cast<float>(sign) * sum;
        }
      }
    }
  });
}

// ---- barriers in shared memory, and copies ----

inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  Block::current().barrier_init(barrier, static_cast<int>(arrivals));
}
inline void barrier_init_fence() {}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  Block::current().barrier_arrive(barrier, bytes);
}
inline void barrier_arrive(uint32_t barrier) {
  Block::current().barrier_arrive(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  Block::current().barrier_wait(barrier, parity);
}
inline void async_fence() {}

inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  CHECK(bytes % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0, "a bulk copy of ", bytes,
        " bytes off its borders");
  Block& block = Block::current();
  block.some_time([=, &block] {
    std::memcpy(block.shared(to, bytes, 16), from, bytes);
    block.barrier_bytes(barrier, bytes);
  });
}
inline void async_copy(uint32_t to, const void* from, bool valid) {
  CHECK(reinterpret_cast<uintptr_t>(from) % 16 == 0, "a copy off its border");
  Block& block = Block::current();
  block.own_copies().push_back([=, &block] {
    if (valid) {
      std::memcpy(block.shared(to, 16, 16), from, 16);
    } else {
      std::memset(block.shared(to, 16, 16), 0, 16);
    }
  });
}
inline void async_copy_arrive(uint32_t barrier) {
  Block& block = Block::current();
  block.some_time([barrier, &block, copies = std::exchange(block.own_copies(), {})] {
    for (const auto& copy : copies) copy();
    block.barrier_arrive(barrier);
  });
}

}  // namespace palimpsest::cuda::sm90
