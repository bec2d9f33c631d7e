// Hopper's instructions: TMA, mbarrier, wgmma. See sm80.cuh.
#pragma once
#include "sm80.cuh"
#ifdef __CUDACC__
#include "sm90_device.cuh"
#include "wgmma_device.cuh"
#else
#include "emulator/machine/ptx_sm90.h"
#endif
