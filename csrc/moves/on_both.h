// For bodies that a kernel and a worker thread share: they are compiled for both.
#pragma once

#ifdef __CUDACC__
#define STREAMLAP_ON_BOTH __host__ __device__ __forceinline__
#define STREAMLAP_UNROLL _Pragma("unroll")
#else
#define STREAMLAP_ON_BOTH inline
#define STREAMLAP_UNROLL
#endif
