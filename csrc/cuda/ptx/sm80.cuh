// The instructions that kernels use, as plain functions: on the device each is one statement of inline assembly; g++
// gets the same names from the emulator, which runs the kernels on the CPU (tests/emulator).
#pragma once
#ifdef __CUDACC__
#include "wide_device.cuh"
#else
#include "emulator/ptx_wide.h"
#endif
