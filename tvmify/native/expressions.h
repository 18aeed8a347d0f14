// Sizes and conditions over symbols, as artifact/expressions.py describes them.
#pragma once

#include <c10/util/ArrayRef.h>
#include <tvm/ffi/extra/json.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tvmify {

// The index of each symbol by its name.
using SymbolIndices = std::unordered_map<std::string, size_t>;

// A size, or a condition, which is 1 where it holds. It is data from a file: nothing is executed.
class __attribute__((visibility("default"))) Expression {
 public:
  // Read a JSON value; throw c10::ValueError if it describes no size or no condition, or names a
  // symbol that is not there.
  static Expression size(const tvm::ffi::json::Value& value, const SymbolIndices& symbols);
  static Expression condition(const tvm::ffi::json::Value& value, const SymbolIndices& symbols);

  // Returns its value for these values of the symbols; nullopt if a number does not fit into 64
  // bits or a divisor is zero.
  std::optional<int64_t> value(c10::IntArrayRef symbols) const {
    int64_t result;
    if (!evaluate(symbols, result)) return std::nullopt;
    return result;
  }

  // The index of the symbol that it is; nullopt if it is something else.
  std::optional<size_t> symbol() const;

 private:
  enum class Kind {
    kNumber,
    kSymbol,
    kAdd,
    kSubtract,
    kMultiply,
    kFloorDivide,
    kModulo,
    kMinimum,
    kMaximum,
    kEqual,
    kNotEqual,
    kLess,
    kLessOrEqual,
    kAnd,
    kOr,
    kNot
  };
  struct Operator;
  class Reader;

  static const Operator* find(const std::string& name);
  static bool apply(Kind kind, int64_t left, int64_t right, int64_t& result);
  bool evaluate(c10::IntArrayRef symbols, int64_t& result) const;
  bool evaluate_logic(c10::IntArrayRef symbols, int64_t& result) const;
  bool is_condition() const { return kind_ >= Kind::kEqual; }

  Kind kind_ = Kind::kNumber;
  int64_t number_ = 0;  // or the index of the symbol
  std::vector<Expression> operands_;
};

// Read the parts of a JSON value; throw c10::ValueError if it is something else, `what` being its
// name in the message.
int64_t json_number(const tvm::ffi::json::Value& value, const char* what);
std::string json_text(const tvm::ffi::json::Value& value, const char* what);
tvm::ffi::json::Array json_list(const tvm::ffi::json::Value& value, const char* what);

// Parses JSON that may come from anywhere; throws c10::ValueError.
__attribute__((visibility("default"))) tvm::ffi::json::Value parse_json(const std::string& text);

}  // namespace tvmify
