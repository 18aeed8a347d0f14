// ShapeGuard, and how a tuple of leaves meets the shapes of a program.
#pragma once

#include <torch/csrc/python_headers.h>

#include <optional>

#include "../shapes.h"

namespace tvmify::python {

// As Shapes::solve; throws if `leaves` is not a tuple.
std::optional<Shapes::Values> solve_leaves(const Shapes& shapes, PyObject* leaves);

extern PyType_Spec shape_guard_spec;

}  // namespace tvmify::python
