#include "expressions.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <string_view>

namespace tvmify {
namespace {

namespace ffi = tvm::ffi;

// As DEEPEST and LONGEST in artifact/expressions.py.
constexpr size_t kDeepest = 64;
constexpr size_t kLongest = 4096;
// Of JSON: what an expression is in has a few levels of its own.
constexpr size_t kDeepestJson = kDeepest + 8;

// The parser recurses, so depth is limited before it runs.
bool is_deep(std::string_view text) {
  size_t depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (quoted && text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      quoted = !quoted;
    } else if (!quoted && (text[i] == '[' || text[i] == '{')) {
      if (++depth > kDeepestJson) return true;
    } else if (!quoted && (text[i] == ']' || text[i] == '}') && depth > 0) {
      --depth;
    }
  }
  return false;
}

bool divide(int64_t left, int64_t right, int64_t& quotient, int64_t& remainder) {
  if (right == 0) return false;
  if (right == -1) {  // the one quotient that can overflow
    remainder = 0;
    return !__builtin_sub_overflow(int64_t{0}, left, &quotient);
  }
  quotient = left / right;
  remainder = left % right;
  if (remainder != 0 && (remainder < 0) != (right < 0)) {
    --quotient;
    remainder += right;
  }
  return true;
}

}  // namespace

struct Expression::Operator {
  const char* name;
  Kind kind;
  size_t least, most;  // operands
};

const Expression::Operator* Expression::find(const std::string& name) {
  constexpr size_t kMany = std::numeric_limits<size_t>::max();
  static const Operator operators[] = {
      {"+", Kind::kAdd, 2, kMany},       {"-", Kind::kSubtract, 2, 2},
      {"*", Kind::kMultiply, 2, kMany},  {"//", Kind::kFloorDivide, 2, 2},
      {"%", Kind::kModulo, 2, 2},        {"min", Kind::kMinimum, 2, kMany},
      {"max", Kind::kMaximum, 2, kMany}, {"==", Kind::kEqual, 2, 2},
      {"!=", Kind::kNotEqual, 2, 2},     {"<", Kind::kLess, 2, 2},
      {"<=", Kind::kLessOrEqual, 2, 2},  {"and", Kind::kAnd, 2, kMany},
      {"or", Kind::kOr, 2, kMany},       {"not", Kind::kNot, 1, 1},
  };
  for (const Operator& known : operators) {
    if (name == known.name) return &known;
  }
  return nullptr;
}

// Reads one expression and counts its parts.
class Expression::Reader {
 public:
  explicit Reader(const SymbolIndices& symbols) : symbols_(symbols) {}

  Expression read(const ffi::json::Value& value, size_t depth) {
    TORCH_CHECK_VALUE(++count_ <= kLongest, "a size or condition of too many parts");
    Expression read;
    if (value.type_index() == ffi::TypeIndex::kTVMFFIInt) {
      read.number_ = value.cast<int64_t>();
      return read;
    }
    if (const auto name = value.as<ffi::String>()) {
      const auto found = symbols_.find(std::string(*name));
      TORCH_CHECK_VALUE(found != symbols_.end(), "a size names a symbol that is not there");
      read.kind_ = Kind::kSymbol;
      read.number_ = static_cast<int64_t>(found->second);
      return read;
    }
    TORCH_CHECK_VALUE(depth > 0, "a size or condition is nested too deeply");
    const ffi::json::Array parts = json_list(value, "a size or condition");
    TORCH_CHECK_VALUE(!parts.empty(), "a size or condition without an operator");
    const Operator* found = find(json_text(parts[0], "an operator"));
    TORCH_CHECK_VALUE(found != nullptr, "a size or condition has an unknown operator");
    const size_t operands = parts.size() - 1;
    TORCH_CHECK_VALUE(operands >= found->least && operands <= found->most, operands,
                      " operands of ", found->name);
    read.kind_ = found->kind;
    const bool takes_conditions = found->kind >= Kind::kAnd;
    for (size_t i = 1; i < parts.size(); ++i) {
      read.operands_.push_back(this->read(parts[static_cast<int64_t>(i)], depth - 1));
      TORCH_CHECK_VALUE(read.operands_.back().is_condition() == takes_conditions, "operand ", i,
                        " of ", found->name, " is of another kind");
    }
    return read;
  }

 private:
  const SymbolIndices& symbols_;
  size_t count_ = 0;
};

Expression Expression::size(const ffi::json::Value& value, const SymbolIndices& symbols) {
  Expression read = Reader(symbols).read(value, kDeepest);
  TORCH_CHECK_VALUE(!read.is_condition(), "a condition is not a size");
  return read;
}

Expression Expression::condition(const ffi::json::Value& value, const SymbolIndices& symbols) {
  Expression read = Reader(symbols).read(value, kDeepest);
  TORCH_CHECK_VALUE(read.is_condition(), "a size is not a condition");
  return read;
}

std::optional<size_t> Expression::symbol() const {
  if (kind_ != Kind::kSymbol) return std::nullopt;
  return static_cast<size_t>(number_);
}

bool Expression::apply(Kind kind, int64_t left, int64_t right, int64_t& result) {
  int64_t unused;
  switch (kind) {
    case Kind::kAdd:
      return !__builtin_add_overflow(left, right, &result);
    case Kind::kSubtract:
      return !__builtin_sub_overflow(left, right, &result);
    case Kind::kMultiply:
      return !__builtin_mul_overflow(left, right, &result);
    case Kind::kFloorDivide:
      return divide(left, right, result, unused);
    case Kind::kModulo:
      // The remainder fits even where the quotient does not.
      return right == -1 ? (result = 0, true) : divide(left, right, unused, result);
    case Kind::kMinimum:
      result = std::min(left, right);
      return true;
    case Kind::kMaximum:
      result = std::max(left, right);
      return true;
    case Kind::kEqual:
      result = left == right;
      return true;
    case Kind::kNotEqual:
      result = left != right;
      return true;
    case Kind::kLess:
      result = left < right;
      return true;
    case Kind::kLessOrEqual:
      result = left <= right;
      return true;
    default:
      return false;
  }
}

bool Expression::evaluate(c10::IntArrayRef symbols, int64_t& result) const {
  if (kind_ == Kind::kNumber) {
    result = number_;
    return true;
  }
  if (kind_ == Kind::kSymbol) {
    result = symbols[static_cast<size_t>(number_)];
    return true;
  }
  if (kind_ >= Kind::kAnd) return evaluate_logic(symbols, result);
  if (!operands_[0].evaluate(symbols, result)) return false;
  for (size_t i = 1; i < operands_.size(); ++i) {
    const int64_t left = result;
    int64_t right;
    if (!operands_[i].evaluate(symbols, right) || !apply(kind_, left, right, result)) return false;
  }
  return true;
}

bool Expression::evaluate_logic(c10::IntArrayRef symbols, int64_t& result) const {
  const int64_t decides = kind_ == Kind::kOr;  // the value after which no other operand counts
  for (const Expression& operand : operands_) {
    if (!operand.evaluate(symbols, result)) return false;
    if (kind_ != Kind::kNot && result == decides) return true;
  }
  if (kind_ == Kind::kNot) result = 1 - result;
  return true;
}

int64_t json_number(const ffi::json::Value& value, const char* what) {
  // Not by a cast, which takes a bool for a number.
  TORCH_CHECK_VALUE(value.type_index() == ffi::TypeIndex::kTVMFFIInt, what, " is not a number");
  return value.cast<int64_t>();
}

std::string json_text(const ffi::json::Value& value, const char* what) {
  const auto text = value.as<ffi::String>();
  TORCH_CHECK_VALUE(text.has_value(), what, " is not a string");
  return std::string(*text);
}

ffi::json::Array json_list(const ffi::json::Value& value, const char* what) {
  const auto list = value.as<ffi::json::Array>();
  TORCH_CHECK_VALUE(list.has_value(), what, " is not a list");
  return *list;
}

ffi::json::Value parse_json(const std::string& text) {
  TORCH_CHECK_VALUE(!is_deep(text), "JSON is nested too deeply");
  ffi::String error;
  ffi::json::Value value = ffi::json::Parse(ffi::String(text), &error);
  TORCH_CHECK_VALUE(error.empty(), "JSON cannot be read: ", std::string(error));
  return value;
}

}  // namespace tvmify
