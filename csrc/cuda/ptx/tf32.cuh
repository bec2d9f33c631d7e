// Products of floats on tensor cores, on the device and in the emulator (see sm80.cuh).
#pragma once
#ifdef __CUDACC__
#include "tf32_device.cuh"
#else
#include "emulator/ptx_tf32.h"
#endif
