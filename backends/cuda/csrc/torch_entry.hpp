// The C functions that torch's pluggable allocator calls, and the space that they serve from.
#pragma once

#include <memory>
#include <string>

#include "tensor_space.hpp"

namespace harli {

// From now on harli_torch_malloc allocates from `space`; with nullptr it refuses. Spaces bound before are remembered
// until what torch got from them is freed.
void bind_torch_space(std::shared_ptr<TensorSpace> space);
std::shared_ptr<TensorSpace> bound_torch_space();
std::string last_torch_error();  // why the last call was refused, empty if none was

}  // namespace harli

extern "C" {
// Signatures of torch.cuda.memory.CUDAPluggableAllocator. No exception leaves them: null means out of memory to torch,
// which then empties its own caches, tries again and raises torch.OutOfMemoryError.
__attribute__((visibility("default"), used)) void* harli_torch_malloc(ptrdiff_t size, int device, void* stream);
__attribute__((visibility("default"), used)) void harli_torch_free(void* address, ptrdiff_t size, int device, void* stream);
}
