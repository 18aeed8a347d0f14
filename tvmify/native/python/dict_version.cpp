#include "dict_version.h"

#if PY_VERSION_HEX < 0x030C0000

namespace tvmify::python {

DictVersion::DictVersion(PyObject* dict) : dict_(dict) {}

}  // namespace tvmify::python

#elif PY_VERSION_HEX >= 0x030D0000

namespace tvmify::python {

DictVersion::DictVersion(PyObject*) {}

}  // namespace tvmify::python

#else

#include <unordered_map>

namespace tvmify::python {
namespace {

// The counts of all watched dicts. Used with the GIL, and never destroyed: dicts change
// until the interpreter has ended.
using Counts = std::unordered_map<PyObject*, std::weak_ptr<uint64_t>>;

Counts& counts() {
  static Counts* const counts = new Counts;
  return *counts;
}

// CPython calls this before a change, and nothing reads the dict in between.
int on_change(PyDict_WatchEvent, PyObject* dict, PyObject*, PyObject*) {
  const auto found = counts().find(dict);
  if (found == counts().end()) return 0;
  if (const auto changes = found->second.lock()) ++*changes;
  return 0;
}

// One of the eight watchers of an interpreter; negative if none is free.
int watcher() {
  static const int watcher = PyDict_AddWatcher(on_change);
  if (watcher < 0) PyErr_Clear();
  return watcher;
}

void forget(PyObject* dict, const uint64_t* changes) {
  counts().erase(dict);
  // The dict still exists, since owners of a version own the dict, too.
  if (PyDict_Unwatch(watcher(), dict) < 0) PyErr_Clear();
  delete changes;
}

}  // namespace

DictVersion::DictVersion(PyObject* dict) {
  const auto found = counts().find(dict);
  if (found != counts().end()) {
    changes_ = found->second.lock();
    return;
  }
  if (watcher() < 0 || PyDict_Watch(watcher(), dict) < 0) {
    PyErr_Clear();
    return;
  }
  const std::shared_ptr<uint64_t> changes(
      new uint64_t(1), [dict](const uint64_t* changes) { forget(dict, changes); });
  counts().emplace(dict, changes);
  changes_ = changes;
}

}  // namespace tvmify::python

#endif
