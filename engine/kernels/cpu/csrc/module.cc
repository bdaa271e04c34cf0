// The Python module: the handlers as capsules for jax.ffi, and the few switches.

#include <Python.h>
#include <sys/mman.h>

#include <cstdint>

#include "ffi.h"
#include "kernel_table.h"
#include "parallel.h"
#include "self_check.h"

#define HEXSERVE_HANDLERS(handler) \
  handler(read_all) \
  handler(rms_norm) \
  handler(linear) \
  handler(gated_linear) \
  handler(route) \
  handler(gated_experts) \
  handler(expert_sums) \
  handler(rotate) \
  handler(attention) \
  handler(write_kv) \
  handler(export_kv) \
  handler(import_kv) \
  handler(copy_blocks) \
  handler(sample) \
  handler(score)

namespace hexserve {

#define HEXSERVE_DECLARE(name) extern "C" XLA_FFI_Error* hexserve_##name(XLA_FFI_CallFrame*);
HEXSERVE_HANDLERS(HEXSERVE_DECLARE)
#undef HEXSERVE_DECLARE

namespace {

constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack

PyObject* handlers(PyObject*, PyObject*) {
  PyObject* all = PyDict_New();
  if (all == nullptr) return nullptr;
#define HEXSERVE_ADD(name)                                                                       \
  {                                                                                              \
    PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(&hexserve_##name), nullptr, nullptr); \
    if (capsule == nullptr || PyDict_SetItemString(all, #name, capsule) < 0) {                   \
      Py_XDECREF(capsule);                                                                       \
      Py_DECREF(all);                                                                            \
      return nullptr;                                                                            \
    }                                                                                            \
    Py_DECREF(capsule);                                                                          \
  }
  HEXSERVE_HANDLERS(HEXSERVE_ADD)
#undef HEXSERVE_ADD
  return all;
}

PyObject* instruction_sets(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  if (names == nullptr) return nullptr;
  for (const char* const* name = available(); *name != nullptr; ++name) {
    PyObject* text = PyUnicode_FromString(*name);
    if (text == nullptr || PyList_Append(names, text) < 0) {
      Py_XDECREF(text);
      Py_DECREF(names);
      return nullptr;
    }
    Py_DECREF(text);
  }
  return names;
}

// Null, with an error set, where it does not run.
const KernelTable* table_of(PyObject* name) {
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) return nullptr;
  const KernelTable* table = find(text);
  if (table == nullptr) PyErr_Format(PyExc_ValueError, "%R does not run on this processor", name);
  return table;
}

PyObject* use_instruction_set(PyObject*, PyObject* name) {
  const KernelTable* table = table_of(name);
  if (table == nullptr) return nullptr;
  choose(*table);
  Py_RETURN_NONE;
}

PyObject* instruction_set(PyObject*, PyObject*) { return PyUnicode_FromString(kernels().name); }

PyObject* self_check(PyObject*, PyObject* name) {
  const KernelTable* table = table_of(name);
  return table == nullptr ? nullptr : PyBool_FromLong(multiplies_right(*table));
}

PyObject* limit_threads(PyObject*, PyObject* count) {
  const long long most = PyLong_AsLongLong(count);
  if (most == -1 && PyErr_Occurred()) return nullptr;
  thread_limit.store(most, std::memory_order_relaxed);
  Py_RETURN_NONE;
}

// Backs a buffer with huge pages, where the system has them to give: a kernel that walks over
// all of a model's weights would else miss the TLB on every page.
PyObject* use_huge_pages(PyObject*, PyObject* arguments) {
  unsigned long long address = 0, size = 0;
  if (!PyArg_ParseTuple(arguments, "KK", &address, &size)) return nullptr;
  constexpr uint64_t kHuge = uint64_t(1) << 21;
  const uint64_t begin = (address + kHuge - 1) / kHuge * kHuge, end = (address + size) / kHuge * kHuge;
  if (begin < end) {
    // A refusal changes nothing but the speed. Collapsing (Linux 6.1) moves what is there already.
    void* pages = reinterpret_cast<void*>(begin);
    madvise(pages, end - begin, MADV_HUGEPAGE);
    madvise(pages, end - begin, kCollapse);
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"handlers", handlers, METH_NOARGS, "Name -> capsule of every handler, for jax.ffi."},
    {"instruction_sets", instruction_sets, METH_NOARGS, "Those this processor runs, best first."},
    {"use_instruction_set", use_instruction_set, METH_O, "Run the named inner loops from now on."},
    {"instruction_set", instruction_set, METH_NOARGS, "The one in use."},
    {"self_check", self_check, METH_O, "Whether the named inner loops multiply a small product right."},
    {"limit_threads", limit_threads, METH_O, "Most threads of one kernel; 0 is no limit."},
    {"use_huge_pages", use_huge_pages, METH_VARARGS, "(address, bytes) of a buffer to stay."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "The CPU kernels; see engine.kernels.cpu.", -1, methods,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace
}  // namespace hexserve

PyMODINIT_FUNC PyInit__native() {
  PyObject* module = PyModule_Create(&hexserve::definition);
  if (module == nullptr) return nullptr;
  if (PyModule_AddStringConstant(module, "jaxlib_version", HEXSERVE_JAXLIB_VERSION) < 0 ||
      PyModule_AddStringConstant(module, "jaxlib_hash", HEXSERVE_JAXLIB_HASH) < 0 ||
      PyModule_AddStringConstant(module, "sources_hash", HEXSERVE_SOURCES_HASH) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
