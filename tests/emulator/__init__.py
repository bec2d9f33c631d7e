"""Every CUDA kernel run on the CPU, by an emulator of the GPU (machine/) that must find planted faults (faults/)."""
