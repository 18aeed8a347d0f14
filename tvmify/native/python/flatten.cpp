// flatten(args, kwargs): collects, in one walk, the leaves of a call and a key that differs for
// calls that need another program.
//
// The key is a sequence of items, each with a tag and a fixed or explicit length, so two different
// calls never have equal keys.

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "../memory_ranges.h"
#include "bindings.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tvmify::python {
namespace {

class Key {
 public:
  template <typename Value>
  void add(Value value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    const auto* bytes = reinterpret_cast<const char*>(&value);
    bytes_.append(bytes, bytes + sizeof(value));
  }
  void add_text(std::string_view text) {
    add(text.size());
    bytes_.append(text.begin(), text.end());
  }
  PyObject* to_python() const {
    return PyBytes_FromStringAndSize(bytes_.data(), static_cast<Py_ssize_t>(bytes_.size()));
  }
  bool operator==(std::string_view other) const {
    return std::string_view(bytes_.data(), bytes_.size()) == other;
  }

 private:
  c10::SmallVector<char, 512> bytes_;
};

// Whether a mode, a function transform or a tracer intercepts this thread's operators, to which
// compiled code would be invisible. Forward-mode differentiation counts too: compiled code would
// lose tangents, which tensors only have while some thread has it on.
bool is_observed() {
  const c10::DispatchKeySet usual = c10::default_included_set | c10::autocast_dispatch_keyset;
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included | usual) != usual || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         at::impl::torch_function_mode_enabled() ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

uint32_t denormal_mode() {
#if defined(__x86_64__)
  constexpr uint32_t kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  return _mm_getcsr() & (kFlushToZero | kDenormalsAreZero);
#elif defined(__aarch64__)
  uint64_t control;
  asm("mrs %0, fpcr" : "=r"(control));
  return static_cast<uint32_t>(control & (uint64_t{1} << 24));
#else
  return 0;
#endif
}

void add_autocast(Key& key, at::DeviceType device) {
  const bool enabled = at::autocast::is_autocast_enabled(device);
  key.add(enabled);
  if (enabled) key.add(at::autocast::get_autocast_dtype(device));
}

// "Never set" and "set to full precision" mean the same, though PyTorch distinguishes them.
at::Float32Precision matmul_precision(at::Float32Backend backend) {
  const auto precision = at::globalContext().float32Precision(backend, at::Float32Op::MATMUL);
  const bool is_reduced =
      precision == at::Float32Precision::TF32 || precision == at::Float32Precision::BF16;
  return is_reduced ? precision : at::Float32Precision::IEEE;
}

// Adds the modes of this thread and of the process that change what an operator computes.
void add_modes(Key& key, bool grad_mode) {
  key.add(grad_mode);
  key.add(c10::InferenceMode::is_enabled());
  add_autocast(key, at::kCPU);
  add_autocast(key, at::kCUDA);
  key.add(c10::typeMetaToScalarType(c10::get_default_dtype()));
  key.add(at::globalContext().deterministicAlgorithms());
  key.add(matmul_precision(at::Float32Backend::MKLDNN));
  key.add(matmul_precision(at::Float32Backend::CUDA));
  key.add(denormal_mode());
}

// One walk over the arguments of a call.
class Walk {
 public:
  explicit Walk(bool grad_mode) { add_modes(key_, grad_mode); }

  // Adds a node and everything in it. Throws python_error with Python's exception set.
  void visit(PyObject* node) {
    if (PyTuple_CheckExact(node)) {
      begin('(', PyTuple_GET_SIZE(node));
      descend([&] {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(node); ++i) visit(PyTuple_GET_ITEM(node, i));
      });
    } else if (PyList_CheckExact(node)) {
      begin('[', PyList_GET_SIZE(node));
      descend([&] {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(node); ++i) visit(PyList_GET_ITEM(node, i));
      });
    } else if (PyDict_CheckExact(node)) {
      begin('{', PyDict_GET_SIZE(node));
      descend([&] {
        PyObject *name, *value;
        for (Py_ssize_t i = 0; PyDict_Next(node, &i, &name, &value);) {
          is_keyed_ = add_value(name) && is_keyed_;
          visit(value);
        }
      });
    } else {
      leaves_.push_back(node);
      const bool known = THPVariable_CheckExact(node) ? add_tensor(node) : add_value(node);
      is_keyed_ = is_keyed_ && known;
    }
  }

  // Adds the keyword arguments of a call, in the order of `keywords`. Returns false if these are
  // other names, or in an order that matters.
  bool visit_named(PyObject* kwargs, const Keywords& keywords) {
    const Py_ssize_t size = PyDict_GET_SIZE(kwargs);
    if (size != PyTuple_GET_SIZE(keywords.names)) return false;
    begin('{', size);
    PyObject *name = nullptr, *value = nullptr;
    Py_ssize_t ordered = keywords.free;
    for (Py_ssize_t i = 0, place = 0; i < size; ++i) {
      const bool is_there = PyDict_Next(kwargs, &place, &name, &value);
      if (!is_there) return false;
      if (ordered < size && is_same(name, PyTuple_GET_ITEM(keywords.names, ordered))) ++ordered;
      PyObject* const wanted = PyTuple_GET_ITEM(keywords.names, i);
      if (name != wanted) {  // usually the order is the same
        value = PyDict_GetItemWithError(kwargs, wanted);
        if (value == nullptr && PyErr_Occurred()) throw python_error();
        if (value == nullptr) return false;
      }
      is_keyed_ = add_value(wanted) && is_keyed_;
      visit(value);
    }
    return ordered == size;
  }

  // Whether the key identifies the call completely.
  bool is_keyed() const { return is_keyed_; }
  const Key& key() const { return key_; }

  // Returns a new tuple of the leaves.
  PyObject* leaves() const {
    PyObject* leaves = PyTuple_New(static_cast<Py_ssize_t>(leaves_.size()));
    if (leaves == nullptr) throw python_error();
    for (size_t i = 0; i < leaves_.size(); ++i) {
      PyTuple_SET_ITEM(leaves, static_cast<Py_ssize_t>(i), Py_NewRef(leaves_[i]));
    }
    return leaves;
  }

 private:
  void begin(char tag, Py_ssize_t size) {
    key_.add(tag);
    key_.add(size);
  }

  template <typename Body>
  static void descend(const Body& body) {
    // A list that contains itself is a RecursionError, as it is for pytree.
    if (Py_EnterRecursiveCall(" in the arguments of a compiled module")) throw python_error();
    struct Leave {
      ~Leave() { Py_LeaveRecursiveCall(); }
    } leave;
    body();
  }

  static bool is_same(PyObject* name, PyObject* other) {
    return name == other || (PyUnicode_Check(name) && PyUnicode_Compare(name, other) == 0);
  }

  // These return whether the key now identifies the leaf completely.
  bool add_tensor(PyObject* leaf) {
    const at::Tensor& tensor = THPVariable_Unpack(leaf);
    // Nested tensors and those of function transforms have no concrete sizes to read here.
    if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.is_nested() ||
        tensor.key_set().has_any(kWrapped)) {
      return false;
    }
    key_.add(Py_TYPE(leaf) == reinterpret_cast<PyTypeObject*>(ParameterClass) ? 'P' : 'T');
    key_.add(tensor.scalar_type());
    key_.add(tensor.device().type());
    key_.add(tensor.device().index());
    key_.add(tensor.key_set().raw_repr());
    key_.add(tensor.requires_grad());
    const c10::IntArrayRef sizes = tensor.sizes();
    key_.add(sizes.size());
    for (const int64_t size : sizes) key_.add(size);
    add_repetition(leaf);
    return true;
  }

  // Adds the earlier place of the same tensor, if any: code may test `query is key`.
  void add_repetition(PyObject* leaf) {
    // A Bloom filter of the addresses: nearly all calls need no search.
    const uint64_t bit = uint64_t{1} << ((reinterpret_cast<uintptr_t>(leaf) >> 4) % 64);
    if ((seen_ & bit) != 0) {
      const auto first = std::find(leaves_.begin(), leaves_.end() - 1, leaf);
      if (first != leaves_.end() - 1) {
        key_.add('=');
        key_.add(first - leaves_.begin());
      }
    }
    seen_ |= bit;
  }

  bool add_value(PyObject* leaf) {
    if (leaf == Py_None) {
      key_.add('N');
    } else if (PyBool_Check(leaf)) {
      key_.add(leaf == Py_True ? '1' : '0');
    } else if (PyLong_CheckExact(leaf)) {
      return add_integer(leaf);
    } else if (PyFloat_CheckExact(leaf)) {
      key_.add('f');
      key_.add(PyFloat_AS_DOUBLE(leaf));  // bitwise: -0.0 differs from 0.0, a NaN equals itself
    } else if (PyComplex_CheckExact(leaf)) {
      key_.add('c');
      key_.add(PyComplex_RealAsDouble(leaf));
      key_.add(PyComplex_ImagAsDouble(leaf));
    } else if (PyUnicode_CheckExact(leaf)) {
      return add_string('s', leaf);
    } else if (THPDtype_Check(leaf)) {
      key_.add('d');
      key_.add(reinterpret_cast<THPDtype*>(leaf)->scalar_type);
    } else if (THPDevice_Check(leaf)) {
      const at::Device device = reinterpret_cast<THPDevice*>(leaf)->device;
      key_.add('v');
      key_.add(device.type());
      key_.add(device.index());
    } else {
      return false;
    }
    return true;
  }

  bool add_integer(PyObject* leaf) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(leaf, &overflow);
    if (overflow != 0) {
      const Owned digits(PyNumber_ToBase(leaf, 16));
      if (digits == nullptr) throw python_error();
      return add_string('I', digits.get());
    }
    key_.add('i');
    key_.add(value);
    return true;
  }

  bool add_string(char tag, PyObject* leaf) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(leaf, &size);
    if (text == nullptr) {  // a lone surrogate has no UTF-8
      PyErr_Clear();
      return false;
    }
    key_.add(tag);
    key_.add_text({text, static_cast<size_t>(size)});
    return true;
  }

  bool is_keyed_ = true;
  uint64_t seen_ = 0;
  Key key_;
  c10::SmallVector<PyObject*, 16> leaves_;  // borrowed: nothing in the walk runs Python code
};

}  // namespace

PyObject* flatten(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 2 && PyTuple_CheckExact(arguments[0]) && PyDict_CheckExact(arguments[1]),
      "flatten() takes a tuple and a dict");
  Walk walk(c10::GradMode::is_enabled());
  walk.visit(arguments[0]);
  walk.visit(arguments[1]);
  Owned leaves(walk.leaves());
  Owned key(walk.is_keyed() && !is_observed() ? walk.key().to_python() : Py_NewRef(Py_None));
  if (key == nullptr) throw python_error();
  PyObject* pair = PyTuple_New(2);
  if (pair == nullptr) throw python_error();
  PyTuple_SET_ITEM(pair, 0, leaves.release());
  PyTuple_SET_ITEM(pair, 1, key.release());
  return pair;
  END_HANDLE_TH_ERRORS
}

PyObject* leaves_of_same_call(PyObject* args, PyObject* kwargs, PyObject* key,
                              const Keywords& keywords) {
  TORCH_CHECK_TYPE(PyTuple_CheckExact(args) && PyDict_CheckExact(kwargs),
                   "the arguments of a call are a tuple and a dict");
  if (!PyBytes_CheckExact(key) || is_observed()) return nullptr;
  Walk walk(c10::GradMode::is_enabled());
  walk.visit(args);
  if (!walk.visit_named(kwargs, keywords)) return nullptr;
  const std::string_view known(PyBytes_AS_STRING(key), static_cast<size_t>(PyBytes_GET_SIZE(key)));
  return walk.is_keyed() && walk.key() == known ? walk.leaves() : nullptr;
}

}  // namespace tvmify::python
