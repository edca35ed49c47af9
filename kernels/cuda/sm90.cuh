// Instructions of Hopper that have no C++ spelling: warp and warpgroup matrix products, their loads and stores, bulk
// copies between global and shared memory, and the barriers that these report to. Shared memory is addressed by its
// 32-bit address.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace palimpsest::cuda::sm90 {

// ---- shared memory ----

// The dynamic shared memory of the block, from the first multiple of 1024 on (the swizzle of the tensor cores repeats
// after so many bytes).
__device__ inline uint32_t dynamic_shared() {
  extern __shared__ uint8_t shared_block[];
  return (static_cast<uint32_t>(__cvta_generic_to_shared(shared_block)) + 1023U) & ~1023U;
}
template <class T>
__device__ inline T* shared_pointer(uint32_t address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// ---- numbers ----

__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ inline float low_of(uint32_t packed) {
  return __uint_as_float(packed << 16);
}
__device__ inline float high_of(uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000U);
}
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_root(float x) {
  return rsqrtf(x);
}
__device__ inline uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// ---- products of one warp ----
// A [16, k] by rows: register pairs hold (row lane/4, columns 2 (lane%4) + {0, 1}), then row + 8, then both with
// columns + 8. B [k, 8] by columns: (rows 2 (lane%4) + {0, 1}, column lane/4), then rows + 8. D [16, 8]: columns
// 2 (lane%4) + {0, 1} of row lane/4, then of row + 8.

__device__ inline void mma_k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void mma_k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
// A [16, 8] and B [8, 8] of tf32, one number a register: rows lane/4, columns lane%4 and + 4.
__device__ inline void mma_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void store_matrices(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
__device__ inline void store_matrices_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// ---- shuffles and barriers ----

__device__ inline float exchange(float x, int lane_mask) {
  return __shfl_xor_sync(0xffffffffU, x, lane_mask);
}
__device__ inline void sync_block() {
  __syncthreads();
}
__device__ inline void sync_warp() {
  __syncwarp();
}
__device__ inline void sync_threads(int barrier, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// ---- products of one warpgroup ----

// A tile in shared memory of rows of 128 bytes, the 16-byte pieces of row r at piece ^ (r % 8). K-major: the rows are
// the columns of B and run along k. MN-major: the rows run along the columns of B, 64 of them; the next 64 columns lie
// `column_stride` bytes further.
constexpr uint64_t kDescriptorSwizzle128 = uint64_t{1} << 62;
__device__ inline uint64_t tile_descriptor(uint32_t address, uint32_t column_stride = 0) {
  return kDescriptorSwizzle128 | (uint64_t{1024 >> 4} << 32) | (uint64_t{column_stride >> 4} << 16) |
         ((address & 0x3ffffU) >> 4);
}

enum class Major : int { kK = 0, kN = 1 };

__device__ inline void warpgroup_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ inline void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Keeps the compiler from moving accesses of the accumulators across a wait.
template <int N>
__device__ inline void pin(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

#define SM90_TILE(constraint, d) constraint((d)[0]), constraint((d)[1]), constraint((d)[2]), constraint((d)[3])
#define SM90_ACCUMULATORS_64(c, d)                                                                    \
  SM90_TILE(c, d[0]), SM90_TILE(c, d[1]), SM90_TILE(c, d[2]), SM90_TILE(c, d[3]), SM90_TILE(c, d[4]), \
      SM90_TILE(c, d[5]), SM90_TILE(c, d[6]), SM90_TILE(c, d[7])
#define SM90_ACCUMULATORS_128(c, d)                                                                             \
  SM90_ACCUMULATORS_64(c, d), SM90_TILE(c, d[8]), SM90_TILE(c, d[9]), SM90_TILE(c, d[10]), SM90_TILE(c, d[11]), \
      SM90_TILE(c, d[12]), SM90_TILE(c, d[13]), SM90_TILE(c, d[14]), SM90_TILE(c, d[15])

// d [64, 64] (+)= (+/-) a [64, 16] B [16, 64], a and d as in the products of one warp, 16 rows a warp.
template <Major major, int sign, bool accumulate = true>
__device__ inline void warpgroup_product(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (accumulate) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, %37, 1, "
        "%38;"
        : SM90_ACCUMULATORS_64("+f", d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(sign), "n"(static_cast<int>(major)));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 0, %37, 1, "
        "%38;"
        : SM90_ACCUMULATORS_64("=f", d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(sign), "n"(static_cast<int>(major)));
  }
}
// d [64, 128] (+)= (+/-) a [64, 16] B [16, 128]
template <Major major, int sign, bool accumulate = true>
__device__ inline void warpgroup_product(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (accumulate) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, %69, 1, %70;"
        : SM90_ACCUMULATORS_128("+f", d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(sign), "n"(static_cast<int>(major)));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 0, %69, 1, %70;"
        : SM90_ACCUMULATORS_128("=f", d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(sign), "n"(static_cast<int>(major)));
  }
}
#undef SM90_ACCUMULATORS_128
#undef SM90_ACCUMULATORS_64
#undef SM90_TILE

// ---- barriers in shared memory, and bulk copies ----

__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits until the phase of this parity is complete.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Between ordinary accesses of shared memory and those of bulk copies and warpgroup products.
__device__ inline void async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// `bytes`, a multiple of 16, between 16-byte boundaries.
__device__ inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// 16 bytes by each thread, or zeros; the barrier counts one arrival for all that the thread has asked for so far.
__device__ inline void async_copy(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ inline void async_copy_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
}  // namespace palimpsest::cuda::sm90
