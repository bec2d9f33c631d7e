// The instructions that kernels use, as plain functions: on the device each is one statement of inline assembly; g++
// gets the same names from the emulator, which runs the kernels on the CPU (tests/emulator).
#pragma once
#ifdef __CUDACC__
#include "fp32_device.cuh"
#else
#include "emulator/machine/ptx_fp32.h"
#endif
