// Lent: tensors whose memory callers borrow. It is lent again once no borrowed tensor is left.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <vector>

#include "bindings.h"

namespace tvmify::python {
namespace {

// A tensor, and the reference count of its storage while no caller borrows it. Resizing a result
// gives the storage other memory, so the address is compared, too.
struct Lendable {
  at::Tensor tensor;
  size_t uses;
  const void* address;

  explicit Lendable(at::Tensor given)
      : tensor(std::move(given)), uses(storage().use_count()), address(storage().data()) {}

  const at::Storage& storage() const { return tensor.unsafeGetTensorImpl()->unsafe_storage(); }
  bool is_free() const { return storage().use_count() == uses && storage().data() == address; }
};

struct Lent {
  PyObject_HEAD std::vector<Lendable> all;

  static Lent* from(PyObject* self) { return reinterpret_cast<Lent*>(self); }
};

PyObject* is_free(PyObject* self, PyObject*) {
  const std::vector<Lendable>& all = Lent::from(self)->all;
  return PyBool_FromLong(
      std::all_of(all.begin(), all.end(), [](const Lendable& one) { return one.is_free(); }));
}

PyObject* lend(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const std::vector<Lendable>& all = Lent::from(self)->all;
  Owned lent(PyList_New(static_cast<Py_ssize_t>(all.size())));
  if (lent == nullptr) return nullptr;
  for (size_t i = 0; i < all.size(); ++i) {
    PyObject* alias = THPVariable_Wrap(all[i].tensor.variable_data());
    if (alias == nullptr) return nullptr;
    PyList_SET_ITEM(lent.get(), static_cast<Py_ssize_t>(i), alias);
  }
  return lent.release();
  END_HANDLE_TH_ERRORS
}

void dealloc_lent(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Lent::from(self)->all.~vector();
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* create_lent(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* tensors = nullptr;
  if (!PyArg_ParseTuple(args, "O!:Lent", &PyList_Type, &tensors)) return nullptr;
  std::vector<Lendable> all;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* tensor = PyList_GET_ITEM(tensors, i);
    TORCH_CHECK_TYPE(THPVariable_Check(tensor), "expected a tensor, got a ",
                     Py_TYPE(tensor)->tp_name);
    all.emplace_back(THPVariable_Unpack(tensor));
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) new (&Lent::from(self)->all) std::vector<Lendable>(std::move(all));
  return self;
  END_HANDLE_TH_ERRORS
}

PyMethodDef lent_methods[] = {
    {"is_free", is_free, METH_NOARGS, "Whether all borrowed tensors and their views are gone."},
    {"lend", lend, METH_NOARGS, "Return other tensors in the same memory."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot lent_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create_lent)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_lent)},
    {Py_tp_methods, lent_methods},
    {Py_tp_doc,
     const_cast<char*>("Tensors whose memory is lent again once no borrowed tensor is left.")},
    {0, nullptr},
};

}  // namespace

PyType_Spec lent_spec = {"tvmify._C.Lent", sizeof(Lent), 0, Py_TPFLAGS_DEFAULT, lent_slots};

}  // namespace tvmify::python
