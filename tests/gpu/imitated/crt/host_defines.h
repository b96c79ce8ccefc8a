/* What CUDA's headers take from nvidia-cuda-crt, for gcc. With it, the headers of torch's nvidia-cuda-runtime are enough. */
#pragma once
#define __host__
#define __device__
#define __global__
#define __managed__
#define __constant__
#define __device_builtin__
#define __cudart_builtin__
#define __inline__ __inline
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __specialization_static static
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __launch_bounds__(...)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __CUDACC_VER_MAJOR__ 0
