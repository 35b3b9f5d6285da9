// ATen's operations, by the CPU's kernels on the streams' threads: see device.cpp.
namespace sim {

using Values = torch::jit::Stack;
using Change = std::function<at::Tensor(const at::Tensor&)>;

const char* interned(const std::string& text) {  // lives as long as the process
  static std::mutex mutex;
  static auto* all = new Strings;
  Lock lock(mutex);
  return all->insert(text).first->c_str();
}

at::Tensor on_cpu(const at::Tensor& t) {  // the same bytes as a CPU tensor that owns nothing
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(real(t.data_ptr()), t.sizes(), t.strides(), options);
}
void keep_number(const at::Tensor& from, at::Tensor& to) {  // a Python number takes part in type promotion as one
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}
at::Tensor on_meta(const at::Tensor& t) {
  if (!on_sim(t) && t.dim() == 0) return t;
  auto made = at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kMeta));
  keep_number(t, made);
  return made;
}
at::Tensor by_value(const at::Tensor& t) {  // a kernel takes CPU scalars as they are when it is queued
  auto made = t.clone();
  keep_number(t, made);
  return made;
}
at::Tensor new_like(const at::Tensor& t) {
  return at::detail::empty_strided_generic(t.sizes(), t.strides(), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.scalar_type());
}

c10::IValue map_tensors(const c10::IValue& value, Device device, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isDevice()) return value.toDevice().type() == SIM ? c10::IValue(device) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (auto& one : value.toTensorVector()) made.push_back(one.defined() ? change(one) : one);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (std::optional<at::Tensor> one : value.toOptionalTensorList())
      made.push_back(one && one->defined() ? std::optional(change(*one)) : one);
    return made;
  }
  return value;
}
void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& look) {
  map_tensors(value, DEVICE, [&](const at::Tensor& t) {
    look(t);
    return t;
  });
}

void resize_to(const at::Tensor& t, c10::IntArrayRef sizes) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t need = (impl->numel() + impl->storage_offset()) * t.element_size();
  if (t.storage().nbytes() < need) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), need);
}

// What torch's meta kernels say ------------------------------------------------------------------------------

// By operation and types: whether the CPU's kernel was seen to make what the meta kernel says. A kernel may
// choose other strides or, as layer_norm on CUDA, another type. Until it was seen the host waits.
enum class Seen { NEVER, SAME, DIFFERENT, NO_META };
std::map<std::string, Seen> seen;  // under state_mutex

std::string kind_of(const char* name, const Values& values) {
  std::string all = name;
  for (auto& value : values)
    for_each_tensor(value, [&](const at::Tensor& t) { all += std::to_string((int)t.scalar_type()) + ","; });
  return all;
}
Seen seen_of(const std::string& kind) {
  Lock lock(state_mutex);
  return seen[kind];
}
bool same(const at::Tensor& a, const at::Tensor& b) {
  bool same_order = a.numel() < 2 || a.is_contiguous() == b.is_contiguous();
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && same_order;
}
void compare(const std::string& kind, const Values& said, const Values& made) {
  std::vector<at::Tensor> a, b;
  for (auto& value : said) for_each_tensor(value, [&](const at::Tensor& t) { a.push_back(t); });
  for (auto& value : made) for_each_tensor(value, [&](const at::Tensor& t) { b.push_back(t); });
  bool good = a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), same);
  Lock lock(state_mutex);
  if (seen[kind] != Seen::DIFFERENT) seen[kind] = good ? Seen::SAME : Seen::DIFFERENT;
}

bool host_must_wait(const c10::OperatorHandle& op) {
  auto& schema = op.schema();
  for (auto tag : {at::Tag::dynamic_output_shape, at::Tag::data_dependent_output, at::Tag::nondeterministic_seeded})
    if (op.hasTag(tag)) return true;
  for (auto& one : schema.returns())
    if (one.type()->kind() != c10::TypeKind::TensorType && one.type()->str() != "Tensor[]") return true;
  return false;
}

void call(const c10::OperatorHandle& op, Values& values) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(values);
}

// One call of an operation -----------------------------------------------------------------------------------

class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Values given)
      : _op(op), _schema(op.schema()), _name(interned(_schema.name())), _stream(stream_of(current)), _given(std::move(given)) {
    static const Strings indexed{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
    for (auto& one : _schema.returns())
      TORCH_CHECK(!one.alias_info() || one.alias_info()->isWrite(), "sim: ", _name, " returns a view and has no kernel here");
    for (auto& value : _given)
      for_each_tensor(value, [&](const at::Tensor& t) {
        TORCH_CHECK(on_sim(t) || t.dim() == 0 || !t.numel() || indexed.count(_name), "sim: ", _name, " got a tensor on ", t.device());
      });
  }

  Values results() {
    bool late = !host_must_wait(_op) && foretell();
    note_inputs(late);
    for (auto& value : _given)
      _work.push_back(map_tensors(value, at::kCPU, [](const at::Tensor& t) { return on_sim(t) ? on_cpu(t) : by_value(t); }));
    return late ? later() : now();
  }

 private:
  bool writes(size_t i) const {
    auto* info = _schema.arguments()[i].alias_info();
    return info && info->isWrite();
  }
  bool writes_tensor(size_t i) const { return writes(i) && _given[i].isTensor() && on_sim(_given[i].toTensor()); }

  // The argument that is the result with this number, or an undefined tensor: then the result is new.
  at::Tensor written(size_t result) const {
    auto* info = _schema.returns()[result].alias_info();
    for (size_t i = 0; info && i < _given.size(); ++i)
      if (writes(i) && _given[i].isTensor() && _schema.arguments()[i].alias_info()->beforeSets() == info->beforeSets())
        return _given[i].toTensor();
    return {};
  }

  // Asks the meta kernel for the shapes of the results; returns whether the kernel may run later.
  bool foretell() {
    for (auto& value : _given) _said.push_back(map_tensors(value, at::kMeta, on_meta));
    auto asked = _said;
    _kind = std::string(_name) + "." + _schema.overload_name() + kind_of("", asked);
    if (seen_of(_kind) == Seen::NO_META) return _said.clear(), false;
    try {
      call(_op, _said);
    } catch (const std::exception&) {
      Lock lock(state_mutex);
      seen[_kind] = Seen::NO_META;
      _said.clear();
      return false;
    }
    _kind += kind_of("->", _said);
    if (seen_of(_kind) != Seen::SAME) return false;
    for (size_t i = 0; i < _given.size(); ++i)
      if (writes_tensor(i) && _given[i].toTensor().sizes() != asked[i].toTensor().sizes())
        resize_to(_given[i].toTensor(), asked[i].toTensor().sizes());
    return true;
  }

  void note_inputs(bool late) {
    Lock lock(state_mutex);
    merge_into(_stream->known, host);
    ++counts.kernels;
    if (late) ++counts.late_kernels;
    else waited.insert(_name);
    for (size_t i = 0; i < _given.size(); ++i)
      for_each_tensor(_given[i], [&](const at::Tensor& t) {
        if (on_sim(t)) check_access(_stream, t.data_ptr(), span(t), writes(i), _name);
      });
  }
  void note_result(const at::Tensor& t) {
    Lock lock(state_mutex);
    check_access(_stream, t.data_ptr(), span(t), true, _name);
  }

  Values later() {
    Values made;
    std::vector<std::vector<at::Tensor>> targets(_said.size());
    for (size_t i = 0; i < _said.size(); ++i) {
      auto known = written(i);
      made.push_back(known.defined() ? c10::IValue(known) : map_tensors(_said[i], DEVICE, new_like));
      if (known.defined()) continue;
      for_each_tensor(made[i], [&](const at::Tensor& t) {
        note_result(t);
        targets[i].push_back(on_cpu(t));
      });
    }
    _stream->push([op = _op, name = _name, stream = _stream, work = std::move(_work), targets = std::move(targets)]() mutable {
      stream->delay(kernel_us);
      call(op, work);
      for (size_t i = 0; i < targets.size(); ++i) {
        auto to = targets[i].begin();
        if (targets[i].empty()) continue;
        for_each_tensor(work[i], [&](const at::Tensor& t) {
          if (!same(t, *to)) {
            Lock lock(state_mutex);
            surprised.insert(name);
            TORCH_CHECK(t.scalar_type() == to->scalar_type() && t.sizes() == to->sizes(), "sim: ", name,
                        " made another type or shape than its meta kernel says");
          }
          (to++)->copy_(t);
        });
      }
    });
    return made;
  }

  Values now() {
    std::exception_ptr error;
    auto before = _work;
    _stream->push([&] {
      try {
        call(_op, _work);
      } catch (...) {
        error = std::current_exception();
      }
    });
    wait_on_host(_stream);
    if (error) std::rethrow_exception(error);
    for (size_t i = 0; i < _given.size(); ++i)
      if (writes_tensor(i)) take_over(_given[i].toTensor(), before[i].toTensor());
    if (!_said.empty()) compare(_kind, _said, _work);
    Values made;
    for (size_t i = 0; i < _work.size(); ++i) {
      auto known = written(i);
      made.push_back(known.defined() ? c10::IValue(known) : map_tensors(_work[i], DEVICE, [&](const at::Tensor& t) {
        auto to = new_like(t);
        _stream->drain();  // its memory is filled with NaN on the stream
        note_result(to);
        on_cpu(to).copy_(t);
        return to;
      }));
    }
    return made;
  }
  void take_over(const at::Tensor& to, const at::Tensor& from) {  // what a kernel wrote, if it was resized
    if (to.sizes() != from.sizes()) resize_to(to, from.sizes());
    if (!from.numel() || from.data_ptr() == real(to.data_ptr())) return;
    _stream->drain();
    on_cpu(to).copy_(from);
  }

  c10::OperatorHandle _op;
  const c10::FunctionSchema& _schema;
  const char* _name;
  StreamThread* _stream;
  Values _given, _work, _said;
  std::string _kind;
};

void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto n = op.schema().arguments().size();
  Values made = Launch(op, Values(stack->end() - n, stack->end())).results();
  stack->erase(stack->end() - n, stack->end());
  stack->insert(stack->end(), made.begin(), made.end());
}

}  // namespace sim
