// The arguments of a call to a saved module: their text, and the tensors in them.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace tvmify {

enum class TensorText { kDescribed, kPattern, kCollectedOnly };

// Appends the tensors inside `value` to `tensors`, in the order of the text, and to `text` a
// description that is equal for two values if and only if the same program serves both:
// "(float32[1, 3, 224, 224], None, {4'mask': bool[1, 10]}, 1.5)". Tensors are described by dtype
// and shape, not by device, since each device may have its own program (`common_device`);
// everything else by value. With `kPattern`, each size is a "_", so that the text is equal for
// values that differ in sizes only; with `kCollectedOnly`, a tensor is only a "_" in the text.
void describe(const c10::IValue& value, TensorText mode, std::string& text,
              std::vector<at::Tensor>& tensors);

// The device of these tensors; nullopt if they are on several, the CPU if there are none.
std::optional<c10::Device> common_device(at::ArrayRef<at::Tensor> tensors);

}  // namespace tvmify
