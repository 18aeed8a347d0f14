// Counts the changes of dicts.
#pragma once

#include <torch/csrc/python_headers.h>

#include <cstdint>
#include <memory>

namespace tvmify::python {

// Tells whether a dict has changed, in a nanosecond. The dict has to outlive this object.
//
// Until CPython 3.11 each dict has such a number itself. 3.12 tells a watcher of each change (PEP
// 699). 3.13 does not for writes to attributes, which it keeps beside an object's dict: there is no
// number then, and callers have to compare the items.
class DictVersion {
 public:
  DictVersion() = default;
  explicit DictVersion(PyObject* dict);

  // A number that this dict did not have before its last change; 0 if this Python has no numbers.
  uint64_t now() const {
#if PY_VERSION_HEX < 0x030C0000
    return reinterpret_cast<PyDictObject*>(dict_)->ma_version_tag;
#elif PY_VERSION_HEX < 0x030D0000
    return changes_ == nullptr ? 0 : *changes_;
#else
    return 0;
#endif
  }

 private:
#if PY_VERSION_HEX < 0x030C0000
  PyObject* dict_ = nullptr;
#elif PY_VERSION_HEX < 0x030D0000
  std::shared_ptr<const uint64_t> changes_;
#endif
};

}  // namespace tvmify::python
