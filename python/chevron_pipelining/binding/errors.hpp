#pragma once

#include <exception>
#include <optional>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chevron/prove/proved_plan.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/random_scope.hpp>

#include "object.hpp"

/// \file
/// Entries from Python into Chevron, and Chevron's errors as exceptions of `chevron_pipelining.errors`.

namespace chevron_pipelining {

/// Makes the Python exception of a Chevron error. \param nested the exception that a stage, a loss or an optimizer threw; may be
/// null
inline py::object exception_of(chevron::error const& e, py::handle nested) {
  chevron::error_context const& at = e.context();
  return py::module_::import("chevron_pipelining.errors")
      .attr("make")(e.code(), e.what(), at.rank, at.peer, at.step, at.action, nested.ptr() == nullptr ? py::none() : nested);
}

/// Raises the Python exception that `kept` stores, with its traceback.
[[noreturn]] inline void raise(python_error& kept) {
  kept.restore();
  throw py::error_already_set();
}

/// Raises a Chevron error in Python, with the exception of Python code that caused it as `__cause__`. A pending signal, and an
/// exception that ends the program (KeyboardInterrupt, SystemExit), is raised in place of the error.
[[noreturn]] inline void raise(chevron::error const& e) {
  PyErr_Clear();  // autograd's engine leaves the exception of a hook set on this thread
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  py::object cause;
  try {
    std::rethrow_if_nested(e);
  } catch (python_error& of_python) {
    PyErr_NormalizeException(&of_python.type, &of_python.value, &of_python.traceback);
    if (of_python.traceback != nullptr) PyException_SetTraceback(of_python.value, of_python.traceback);
    if (PyErr_GivenExceptionMatches(of_python.value, PyExc_Exception) == 0) raise(of_python);
    cause = py::reinterpret_borrow<py::object>(of_python.value);
  } catch (...) {
    // An exception of C++: its text is in the sentence.
  }
  py::object const raised = exception_of(e, cause);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  throw py::error_already_set();
}

/// Runs `work` of Chevron without the GIL. Random numbers come from the process's generator, which `seeded_process` seeds
/// (module.hpp): Chevron's own streams are off, as torch.utils.checkpoint cannot repeat draws from them.
/// \returns the result of `work`
template <class Work>
auto in_chevron(Work const& work) {
  try {
    py::gil_scoped_release const free;
    c10::impl::ExcludeDispatchKeyGuard const plain(chevron::detail::random_key);
    return work();
  } catch (chevron::error const& e) {
    raise(e);
  } catch (chevron::invalid_schedule_error const& e) {
    raise(chevron::usage_error(e.what()));
  } catch (python_error& e) {
    raise(e);
  }
}

/// Releases the GIL, if this thread has it, until the end of the scope: for destructors, which also run without it.
class without_gil {
 public:
  without_gil() {
    if (PyGILState_Check() != 0) free_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> free_;
};

}  // namespace chevron_pipelining
