// The arguments of a call of a saved module: as text, and the tensors in them.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace tvmify {

enum class Tensors { kDescribed, kCollectedOnly };

// Appends the tensors inside of `value` to `tensors`, in the order in which they are written, and
// to `text` a description that is equal for two values exactly when one program serves both:
// "(float32[1, 3, 224, 224], None, {4'mask': bool[1, 10]}, 1.5)". Tensors count by dtype, shape
// and, off the CPU, device; everything else counts by its value. With `kCollectedOnly`, tensors
// leave only a "_" in the text.
void describe(const c10::IValue& value, Tensors mode, std::string& text,
              std::vector<at::Tensor>& tensors);

}  // namespace tvmify
