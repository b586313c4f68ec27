// Replay recorded calls of functions of tensors: allocate, launch kernels and call ops of PyTorch, without Python.
// replay.py records the calls, and explains which calls are replayed.

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/hash.h>
#include <bit>
#include <dlfcn.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace py = pybind11;
using at::Tensor;
using Values = std::vector<Tensor>;
using Optionals = std::vector<std::optional<Tensor>>;
using Sizes = std::array<unsigned, 3>;

namespace {

// Return a function of a library that PyTorch has loaded, or null; nothing is linked against it.
template <class F>
F* find_in(const char* name, const char* function) {
  void* library = dlopen(name, RTLD_LAZY);
  return library ? reinterpret_cast<F*>(dlsym(library, function)) : nullptr;
}

template <class F>
F* find_in_driver(const char* function) {
  return find_in<F>("libcuda.so.1", function);
}

template <class F>
F* of_driver(const char* name) {
  auto* function = find_in_driver<F>(name);
  TORCH_CHECK(function, "the CUDA driver is not there, or has no ", name);
  return function;
}

void launch(void* kernel, Sizes grid, Sizes block, unsigned shared, void* stream, void** parameters) {
  using F = int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  static auto* launch = of_driver<F>("cuLaunchKernel");
  auto [x, y, z] = grid;
  if (!x || !y || !z) return;
  const char* message = "unknown error";
  int status = launch(kernel, x, y, z, block[0], block[1], block[2], shared, stream, parameters, nullptr);
  if (status) of_driver<int(int, const char**)>("cuGetErrorString")(status, &message);
  TORCH_CHECK(!status, "CUDA driver: ", message);
}

template <class Backend>
void* current_stream(const Backend& backend, c10::Device device) {
  auto stream = backend.getStream(device);
  if constexpr (requires { backend.getStreamNativeHandle(stream); }) {
    return backend.getStreamNativeHandle(stream);
  } else {  // before PyTorch 2.11
    static auto* ask = find_in<int(int32_t, void**)>("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream");
    void* handle = nullptr;
    TORCH_CHECK(ask && !ask(device.index(), &handle), "the current CUDA stream is not known");
    return handle;
  }
}

void* current_stream(c10::Device device) {  // tests replay on the CPU, which has none
  return device.is_cuda() ? current_stream(c10::impl::VirtualGuardImpl(device.type()), device) : nullptr;
}

// Return whether a CUDA graph may capture the current stream. Its calls are ordinary ones, which know what to keep.
bool is_capturing(const Values& tensors) {
  static auto* ask = find_in_driver<int(void*, int*)>("cuStreamIsCapturing");
  auto first = std::find_if(tensors.begin(), tensors.end(), [](const Tensor& x) { return x.defined(); });
  int status = 0;
  return first == tensors.end() || !ask || (ask(current_stream(first->device()), &status) || status);
}

// Return the bytes of a parameter of a kernel, 0 after the last one.
size_t bytes_of_parameter(void* kernel, size_t i) {
  static auto* describe = of_driver<int(void*, size_t, size_t*, size_t*)>("cuFuncGetParamInfo");
  size_t offset = 0, bytes = 0;
  return describe(kernel, i, &offset, &bytes) ? 0 : bytes;
}

struct Step {
  std::function<void(Values&, void* stream)> run;
  std::vector<int> reads, makes;
  bool has_effect;  // besides what it makes
  std::vector<int> last = {};  // values that no later step reads
};

// The steps of a call. Its values are numbered: the tensors that it is given, then those that steps make. All other
// tensors are constants.
struct Tape {
  std::unordered_map<const c10::TensorImpl*, int> numbers;
  std::unordered_set<const c10::TensorImpl*> owners;      // values that are not views
  std::unordered_set<const c10::StorageImpl*> storages;  // of the values
  // So that no two values have one address, though their memory goes while the call is recorded, as in any other call:
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> addresses;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storage_addresses;
  Values constants;
  std::vector<Step> steps;
  int size = 0;

  explicit Tape(const Optionals& given) {
    for (const auto& x : given) {
      if (x) number(*x);
      ++size;
    }
  }

  bool number(const Tensor& x) {
    if (storages.insert(x.storage().unsafeGetStorageImpl()).second)
      storage_addresses.push_back(x.storage().getWeakStorageImpl());
    addresses.emplace_back(x.getIntrusivePtr());
    return numbers.emplace(x.unsafeGetTensorImpl(), size).second;
  }

  // Return the number of a value, -1 for a constant. A view that no op has made looks like a constant, but is none.
  int find(const Tensor& x) const {
    auto found = numbers.find(x.unsafeGetTensorImpl());
    if (found != numbers.end()) return found->second;
    TORCH_CHECK(!storages.count(x.storage().unsafeGetStorageImpl()), "a view was made without an op");
    return -1;
  }

  void own(const Values& made) {
    for (const auto& x : made) owners.insert(x.unsafeGetTensorImpl());
  }

  bool owns(const Tensor& x) const { return owners.count(x.unsafeGetTensorImpl()) > 0; }

  int add(const Tensor& x) { return number(x) ? size++ : numbers.at(x.unsafeGetTensorImpl()); }

  void allocate(const Tensor& x) {
    int number = add(x);
    auto run = [number, sizes = x.sizes().vec(), strides = x.strides().vec(), options = x.options()](
                   Values& values, void*) { values[number] = at::empty_strided(sizes, strides, options); };
    steps.push_back({run, {}, {number}, false});
  }

  // Record a launch. An argument is a tensor, or the bytes of a number. Triton adds two pointers to scratch memory,
  // null for kernels that need none. The driver knows the parameters of a kernel: any others are refused.
  void launch(py::object owner, uintptr_t function, Sizes grid, unsigned threads, unsigned shared, py::list arguments) {
    auto* kernel = reinterpret_cast<void*>(function);
    std::vector<uint64_t> cells;
    std::vector<std::pair<size_t, int>> pointers;
    std::vector<int> reads;
    for (auto argument : arguments) {
      uint64_t cell = 0;
      size_t bytes = sizeof cell;
      if (THPVariable_Check(argument.ptr())) {
        const Tensor& x = THPVariable_Unpack(argument.ptr());
        cell = reinterpret_cast<uint64_t>(x.data_ptr());
        if (int number = find(x); number < 0) constants.push_back(x);
        else pointers.emplace_back(cells.size(), number), reads.push_back(number);
      } else {
        bytes = argument.cast<std::string>().copy(reinterpret_cast<char*>(&cell), sizeof cell);
      }
      TORCH_CHECK(bytes == bytes_of_parameter(kernel, cells.size()), "the kernel has other parameters");
      cells.push_back(cell);
    }
    for (size_t bytes; (bytes = bytes_of_parameter(kernel, cells.size())); cells.push_back(0))
      TORCH_CHECK(bytes == 8 && cells.size() < arguments.size() + 2, "the kernel has unknown parameters");
    auto loaded = std::make_shared<c10::SafePyObject>(owner.release().ptr(), getPyInterpreter());  // with its owner
    auto run = [=](Values& values, void* stream) {
      c10::SmallVector<uint64_t, 64> numbers(cells.begin(), cells.end());
      c10::SmallVector<void*, 64> parameters;
      for (auto [i, number] : pointers) numbers[i] = reinterpret_cast<uint64_t>(values[number].data_ptr());
      for (auto& number : numbers) parameters.push_back(&number);
      ::launch(kernel, grid, {threads, 1, 1}, shared, stream, parameters.data());
    };
    steps.push_back({[run, loaded](Values& values, void* stream) { run(values, stream); }, reads, {}, true});
  }

  // Record a call of an op of PyTorch that returned `outs`.
  void op(const std::string& name, const std::string& overload, py::tuple args, py::dict options, const Values& outs) {
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    auto kwargs = py::reinterpret_borrow<py::kwargs>(options);
    auto stack = torch::jit::createStackForSchema(handle.schema(), torch::jit::tuple_slice(args), kwargs, std::nullopt);
    auto is_known = [&](const Tensor& x) { return numbers.count(x.unsafeGetTensorImpl()) > 0; };
    bool has_effect = handle.schema().is_mutable();
    if (!has_effect && std::all_of(outs.begin(), outs.end(), is_known)) return;
    std::vector<std::pair<size_t, int>> tensors;
    std::vector<int> reads, makes;
    for (size_t i = 0; i < stack.size(); ++i) {
      TORCH_CHECK(!stack[i].isTensorList() && !stack[i].isOptionalTensorList(), name, " takes a list of tensors");
      if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
      int number = find(stack[i].toTensor());
      if (number < 0) continue;
      reads.push_back(number);
      tensors.emplace_back(i, number);
      stack[i] = c10::IValue();
    }
    for (const auto& x : outs) makes.push_back(add(x));
    auto run = [=](Values& values, void*) {
      auto called = stack;
      for (auto [i, number] : tensors) called[i] = values[number];
      handle.callBoxed(called);
      auto number = makes.begin();
      for (auto& result : called)
        for (auto& x : result.isTensor() ? Values{result.toTensor()} : result.toTensorVector()) values[*number++] = x;
    };
    steps.push_back({run, reads, makes, has_effect});
  }

  // Leave out steps that nothing needs, and let values go after their last use; `results` stay.
  void finish(const std::vector<int>& results) {
    std::unordered_set<int> needed(results.begin(), results.end());
    for (size_t i = steps.size(); i-- > 0;) {
      Step& step = steps[i];
      for (int value : step.makes) step.has_effect |= needed.count(value) > 0;
      for (auto* values : {&step.reads, &step.makes})
        for (int value : *values)
          if (step.has_effect && needed.insert(value).second) step.last.push_back(value);
    }
    std::erase_if(steps, [](const Step& step) { return !step.has_effect; });
    numbers.clear();
    owners.clear();
    storages.clear();
    addresses.clear();
    storage_addresses.clear();
  }

  // Add the values that steps make to the given ones.
  void run(Values& values) const {
    auto device = std::find_if(values.begin(), values.end(), [](const Tensor& x) { return x.defined(); })->device();
    c10::DeviceGuard guard(device);
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // its casts are steps
    void* stream = current_stream(device);
    thread_local std::unordered_set<c10::Device> has_context;  // which a thread with cached memory may lack
    if (has_context.insert(device).second) at::zeros({1}, device);
    values.resize(size);
    for (const auto& step : steps) {
      step.run(values, stream);
      for (int value : step.last) values[value].reset();
    }
  }
};

using Key = std::vector<int64_t>;

// Add what a call may depend on of its tensors; return false for tensors that have no such description.
bool describe(Key& key, const Values& tensors) {
  for (const Tensor& x : tensors) {
    auto* impl = x.unsafeGetTensorImpl();
    auto first = std::find_if(tensors.begin(), tensors.end(), [&](auto& y) { return y.unsafeGetTensorImpl() == impl; });
    key.push_back(x.defined() ? first - tensors.begin() : -1);
    if (!x.defined()) continue;
    if (!x.is_cuda() && !x.is_cpu()) return false;
    if (x.layout() != at::kStrided || !x.has_storage() || impl->has_symbolic_sizes_strides()) return false;
    if (impl->is_python_dispatch() || torch::autograd::isFwGradDefined(x)) return false;
    auto address = reinterpret_cast<int64_t>(x.const_data_ptr());
    auto keys = static_cast<int64_t>(x.key_set().raw_repr());
    key.insert(key.end(), {keys, int64_t(x.scalar_type()), x.device().index(), address % 16, x.dim()});
    key.insert(key.end(), x.sizes().begin(), x.sizes().end());
    key.insert(key.end(), x.strides().begin(), x.strides().end());
  }
  return true;
}

// Begin a key with what a call may depend on of its thread: autocast, inference mode, all that dispatch keys stand for.
Key describe_thread() {
  auto state = c10::impl::tls_local_dispatch_key_set();
  auto excluded = state.excluded_.raw_repr() & ~c10::full_backend_mask;  // whose bits guards leave behind
  Key key = {static_cast<int64_t>(state.included_.raw_repr()), static_cast<int64_t>(excluded)};
  for (auto device : {at::kCUDA, at::kCPU})
    key.push_back(at::autocast::is_autocast_enabled(device) ? int64_t(at::autocast::get_autocast_dtype(device)) : -1);
  return key;
}

struct Calls;

// How calls of a kind are replayed: the numbers of values, -1 for None, and what autograd has to know.
struct Plan {
  Tape tape;
  std::vector<int> outputs, saved;
  std::vector<bool> differentiable;
  bool is_single = false, materialize = false;
  std::shared_ptr<Calls> backward;

  Plan(const Tape& recorded, const Optionals& of_outputs, const Optionals& of_saved) : tape(recorded) {
    for (auto [tensors, numbers] : {std::pair(&of_outputs, &outputs), std::pair(&of_saved, &saved)})
      for (const auto& x : *tensors) {
        numbers->push_back(x ? tape.find(*x) : -1);
        TORCH_CHECK(!x || numbers->back() >= 0, "a result comes from outside of the call");
      }
    auto results = outputs;
    results.insert(results.end(), saved.begin(), saved.end());
    tape.finish(results);
  }
};

py::tuple to_python(const Values& tensors) {
  py::tuple objects(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i)
    objects[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[i]));
  return objects;
}

// The calls of a function: `ordinary` computes them, `record` returns the plan of their kind, or None.
struct Calls {
  static constexpr size_t MOST_PLANS = 512;
  c10::SafePyObject ordinary, record;
  std::mutex mutex = {};
  std::unordered_map<Key, std::shared_ptr<Plan>, c10::hash<Key>> plans = {};
  std::vector<py::object> settings = {};  // whose addresses are in keys

  Calls(py::object ordinary, py::object record)
      : ordinary(ordinary.release().ptr(), getPyInterpreter()), record(record.release().ptr(), getPyInterpreter()) {}

  static py::object ask(const c10::SafePyObject& function, const py::tuple& arguments) {
    return py::handle(function.ptr(getPyInterpreter()))(*arguments);
  }

  // Return the plan of a kind, null where calls are ordinary ones, or nothing where that is not known yet.
  std::optional<std::shared_ptr<Plan>> find(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = plans.find(key);
    if (found != plans.end()) return found->second;
    return plans.size() < MOST_PLANS ? std::nullopt : std::optional<std::shared_ptr<Plan>>(nullptr);
  }

  // Record a call whose kind is not known, and keep the settings, whose addresses are in the key.
  std::shared_ptr<Plan> make(const Key& key, const py::tuple& arguments, const std::vector<py::object>& others = {}) {
    auto recorded = ask(record, arguments);
    if (recorded.ptr() == Py_NotImplemented) return nullptr;
    auto plan = recorded.cast<std::shared_ptr<Plan>>(), replaced = plan;  // which may end without the lock
    settings.insert(settings.end(), others.begin(), others.end());
    std::lock_guard<std::mutex> lock(mutex);
    std::swap(plans[key], replaced);
    return plan;
  }

  void forget() {  // but keep the constants: captured CUDA graphs may hold their addresses
    static auto* forgotten = new std::vector<decltype(plans)>;
    std::vector<py::object> unused;
    std::lock_guard<std::mutex> lock(mutex);
    forgotten->push_back(std::exchange(plans, {}));
    unused.swap(settings);
  }

  py::object call(py::args arguments);
};

struct Backward : torch::autograd::Node {
  std::shared_ptr<Plan> plan;
  std::vector<torch::autograd::SavedVariable> saved;

  explicit Backward(std::shared_ptr<Plan> plan) : plan(std::move(plan)) {}

  std::string name() const override { return "ReplayedBackward"; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "compiled autograd cannot trace the backward pass of a replayed call. Enable it "
                                "before the forward pass, or set HEADMIX_VISION_REPLAY=0.");
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& x : saved) x.reset_data();
  }

  Values apply(Values&& gradients) override {
    Values tensors = std::move(gradients), results;
    for (size_t i = 0; i < tensors.size() && plan->materialize; ++i)
      if (!tensors[i].defined()) tensors[i] = input_metadata(i).zeros_like();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& x : saved) tensors.push_back(x.unpack(shared_from_this()));
    }
    auto key = describe_thread();
    bool has_kind = !at::GradMode::is_enabled() && describe(key, tensors) && !is_capturing(tensors);
    auto found = has_kind ? plan->backward->find(key) : nullptr;
    if (!found || !*found) {
      py::gil_scoped_acquire gil;
      auto arguments = to_python(tensors);
      if (!found) found = plan->backward->make(key, arguments);
      if (!*found) {
        for (auto x : Calls::ask(plan->backward->ordinary, arguments))
          results.push_back(x.is_none() ? Tensor() : THPVariable_Unpack(x.ptr()));
        return results;
      }
    }
    (*found)->tape.run(tensors);
    for (int number : (*found)->outputs) results.push_back(number < 0 ? Tensor() : tensors[number]);
    return results;
  }
};

// Add a number, or a list or tuple of whole numbers, to a key; return false for what is none of these.
bool describe_number(Key& key, PyObject* x) {
  if (PyFloat_CheckExact(x)) {
    key.insert(key.end(), {1, std::bit_cast<int64_t>(PyFloat_AS_DOUBLE(x))});
    return true;
  }
  bool is_list = PyList_CheckExact(x), has_size = is_list || PyTuple_CheckExact(x);
  Py_ssize_t size = has_size ? PySequence_Fast_GET_SIZE(x) : 1;
  Key numbers = {is_list ? 2 : has_size ? 4 : 3, size};
  for (Py_ssize_t i = 0; i < size; ++i) {
    auto* number = has_size ? PySequence_Fast_GET_ITEM(x, i) : x;
    int is_large = 0;
    if (!PyLong_CheckExact(number)) return false;
    numbers.push_back(PyLong_AsLongLongAndOverflow(number, &is_large));
    if (is_large) return false;
  }
  key.insert(key.end(), numbers.begin(), numbers.end());
  return true;
}

py::object Calls::call(py::args arguments) {
  HANDLE_TH_ERRORS  // as PyTorch's own functions, whose errors have types of their own
  Values tensors, outputs;
  std::vector<py::object> others;
  bool requires_grad = false, has_kind = true;
  auto key = describe_thread();
  key.push_back(arguments.size());
  for (auto argument : arguments) {
    auto* x = argument.ptr();
    if (THPVariable_CheckExact(x)) {
      key.push_back(0);
      tensors.push_back(THPVariable_Unpack(x));
      requires_grad |= tensors.back().requires_grad();
    } else if (!describe_number(key, x)) {
      key.push_back(reinterpret_cast<int64_t>(x));
      others.push_back(py::reinterpret_borrow<py::object>(argument));
      has_kind &= x == Py_None || PyBool_Check(x) || PyTuple_CheckExact(x);
    }
  }
  requires_grad &= at::GradMode::is_enabled();
  key.push_back(requires_grad);
  auto found = has_kind && describe(key, tensors) && !is_capturing(tensors) ? find(key) : nullptr;
  if (!found) found = make(key, arguments, others);
  if (!*found) return ask(ordinary, arguments);
  const auto& plan = *found;
  {
    py::gil_scoped_release no_gil;
    auto values = tensors;
    plan->tape.run(values);
    for (int number : plan->outputs) outputs.push_back(values[number]);
    if (requires_grad && plan->backward) {
      std::shared_ptr<Backward> node(new Backward(plan), torch::autograd::deleteNode);
      node->set_next_edges(torch::autograd::collect_next_edges(tensors));
      for (size_t i = 0; i < outputs.size(); ++i)
        if (plan->differentiable[i]) torch::autograd::set_history(outputs[i], node);
      for (int number : plan->saved)
        if (number < 0) node->saved.emplace_back();
        else node->saved.emplace_back(values[number], values[number].grad_fn() == node);
    }
  }
  auto results = to_python(outputs);
  return plan->is_single ? py::object(results[0]) : results;
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace

PYBIND11_MODULE(headmix_vision_replay, module) {
  py::class_<Tape>(module, "Tape")
      .def(py::init<const Optionals&>())
      .def("own", &Tape::own)
      .def("owns", &Tape::owns)
      .def("allocate", &Tape::allocate)
      .def("launch", &Tape::launch)
      .def("op", &Tape::op);
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan")
      .def(py::init<const Tape&, const Optionals&, const Optionals&>())
      .def_readwrite("differentiable", &Plan::differentiable)
      .def_readwrite("is_single", &Plan::is_single)
      .def_readwrite("materialize", &Plan::materialize)
      .def_readwrite("backward", &Plan::backward);
  py::class_<Calls, std::shared_ptr<Calls>>(module, "Calls")
      .def(py::init<py::object, py::object>())
      .def("__call__", &Calls::call)
      .def("forget", &Calls::forget);
}
