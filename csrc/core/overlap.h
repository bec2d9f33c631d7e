// Operators that write into their arguments: memory that must not be shared, as torch's own in-place operators have it.
#pragma once
#include <vector>

#include "aten.h"

namespace attnjourney {

struct Written {
  const char* name;
  const Tensor& tensor;
};

// RuntimeError where elements of a written tensor share memory with one another, or with another written tensor
void check_apart(const std::vector<Written>& written);

// What is only read: a copy where its memory may be that of a written tensor, for it is to be read as it was before
Tensor apart_from(const Tensor& read, const std::vector<Written>& written);
inline OptionalTensor apart_from(const OptionalTensor& read, const std::vector<Written>& written) {
  return read ? OptionalTensor(apart_from(*read, written)) : read;
}

}  // namespace attnjourney
