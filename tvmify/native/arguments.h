// The arguments of a call of a saved module: as text, and the tensors in them.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace tvmify {

enum class Tensors { kDescribed, kCollectedOnly };

// Appends the tensors inside of `value` to `tensors`, in the order in which they are written, and
// to `text` a description that is equal for two values exactly when one program serves both:
// "(float32[1, 3, 224, 224], None, {4'mask': bool[1, 10]}, 1.5)". Tensors count by dtype and shape,
// not by device, of which there may be one program each (`common_device`); everything else counts
// by its value. With `kCollectedOnly`, tensors leave only a "_" in the text.
void describe(const c10::IValue& value, Tensors mode, std::string& text,
              std::vector<at::Tensor>& tensors);

// The device of these tensors; nothing if they are on several, the CPU if there are none.
std::optional<c10::Device> common_device(at::ArrayRef<at::Tensor> tensors);

}  // namespace tvmify
