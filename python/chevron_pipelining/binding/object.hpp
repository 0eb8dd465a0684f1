#pragma once

#include <memory>
#include <string>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

/// \file
/// Python objects in C++ code that runs without the GIL. Every entry from Python releases the GIL (errors.hpp, `in_chevron`);
/// every call of Python takes it here, and no other code takes it.

namespace chevron_pipelining {

namespace py = pybind11;

/// A Python object that may be copied and dropped without the GIL.
using object = std::shared_ptr<PyObject>;

/// Keeps a Python object alive. After the interpreter has ended, the object is not released.
inline object own(py::handle of) {
  return {of.inc_ref().ptr(), [](PyObject* p) {
            if (Py_IsInitialized() == 0) return;
            py::gil_scoped_acquire const gil;
            Py_DECREF(p);
          }};
}

/// The object for use with the GIL.
inline py::object of(object const& o) { return py::reinterpret_borrow<py::object>(o.get()); }

/// Runs `work` with the GIL. A Python exception leaves as torch's `python_error`, which can be copied and dropped without the
/// GIL; its text begins with the exception's type, since the text of some exceptions is empty. \returns the result of `work`
template <class Work>
auto in_python(Work const& work) {
  py::gil_scoped_acquire const gil;
  try {
    return work();
  } catch (py::error_already_set& e) {
    e.restore();
    python_error kept;
    kept.persist();
    kept.message = std::string(reinterpret_cast<PyTypeObject*>(kept.type)->tp_name) + ": " + kept.message;
    throw kept;
  }
}

}  // namespace chevron_pipelining
