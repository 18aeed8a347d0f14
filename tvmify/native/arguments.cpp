#include "arguments.h"

#include <c10/core/ScalarType.h>

#include <charconv>
#include <string_view>

namespace tvmify {
namespace {

void append(std::string& text, int64_t number) {
  char digits[24];
  text.append(digits, std::to_chars(digits, digits + sizeof(digits), number).ptr);
}

// Writes the shortest digits that round-trip, with a mark that tells floats from integers.
void append(std::string& text, double number) {
  char digits[32];
  const std::string_view written(
      digits,
      static_cast<size_t>(std::to_chars(digits, digits + sizeof(digits), number).ptr - digits));
  text += written;
  if (written.find_first_of(".en") == std::string_view::npos) text += ".0";  // inf and nan have n
}

// Writes the length first, so that no text can fake its own end.
void append_quoted(std::string& text, const std::string& quoted) {
  append(text, static_cast<int64_t>(quoted.size()));
  text.append("'").append(quoted).append("'");
}

// Returns torch's Python name of a dtype.
const char* name_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "float64";
    case at::kFloat:
      return "float32";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kShort:
      return "int16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kBool:
      return "bool";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:
      return c10::toString(dtype);
  }
}

void append(std::string& text, const at::Tensor& tensor, TensorText mode) {
  if (!tensor.defined()) {
    text += "undefined";
    return;
  }
  text += name_of(tensor.scalar_type());
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    text += "[not dense]";
    return;
  }
  text += '[';
  const char* separator = "";
  for (const int64_t size : tensor.sizes()) {
    text += separator;
    if (mode == TensorText::kPattern) {
      text += '_';
    } else {
      append(text, size);
    }
    separator = ", ";
  }
  text += ']';
}

class Description {
 public:
  Description(TensorText mode, std::string& text, std::vector<at::Tensor>& tensors)
      : mode_(mode), text_(text), tensors_(tensors) {}

  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      tensors_.push_back(value.toTensor());
      if (mode_ == TensorText::kCollectedOnly) {
        text_ += '_';
      } else {
        append(text_, tensors_.back(), mode_);
      }
    } else if (value.isNone()) {
      text_ += "None";
    } else if (value.isBool()) {
      text_ += value.toBool() ? "True" : "False";
    } else if (value.isInt()) {
      append(text_, value.toInt());
    } else if (value.isDouble()) {
      append(text_, value.toDouble());
    } else if (value.isString()) {
      append_quoted(text_, value.toStringRef());
    } else if (value.isTuple()) {
      add_all(value.toTupleRef().elements(), "(", ")");
    } else if (value.isList()) {
      add_all(value.toListRef(), "[", "]");
    } else if (value.isGenericDict()) {
      add(value.toGenericDict());
    } else if (value.isDevice()) {
      text_ += value.toDevice().str();
    } else {
      text_ += "a " + value.tagKind();
    }
  }

 private:
  template <typename Items>
  void add_all(const Items& items, const char* open, const char* close) {
    text_ += open;
    const char* separator = "";
    for (const c10::IValue& item : items) {
      text_ += separator;
      add(item);
      separator = ", ";
    }
    text_ += close;
  }

  void add(const c10::impl::GenericDict& dict) {
    text_ += '{';
    const char* separator = "";
    for (const auto& entry : dict) {
      text_ += separator;
      add(entry.key());
      text_ += ": ";
      add(entry.value());
      separator = ", ";
    }
    text_ += '}';
  }

  const TensorText mode_;
  std::string& text_;
  std::vector<at::Tensor>& tensors_;
};

}  // namespace

void describe(const c10::IValue& value, TensorText mode, std::string& text,
              std::vector<at::Tensor>& tensors) {
  Description(mode, text, tensors).add(value);
}

std::optional<c10::Device> common_device(at::ArrayRef<at::Tensor> tensors) {
  std::optional<c10::Device> device;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (device && *device != tensor.device()) return std::nullopt;
    device = tensor.device();
  }
  return device.value_or(c10::kCPU);
}

}  // namespace tvmify
