// Views, allocations, copies, and the registration of all operations: see device.cpp.
namespace sim {

using Ints = c10::SymIntArrayRef;
template <class T>
using Maybe = std::optional<T>;
using Dtype = Maybe<c10::ScalarType>;

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, Dtype dtype, Maybe<c10::Layout>, Maybe<Device>, Maybe<bool>,
                 Maybe<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Maybe<c10::Layout>, Maybe<Device>,
                         Maybe<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& t, Ints size, Ints stride, Maybe<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, Ints size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& t, Ints size, Ints stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor unfold(const at::Tensor& t, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(t, dim, size, step);
}
const at::Tensor& resize_(const at::Tensor& t, Ints size, Maybe<at::MemoryFormat>) {
  resize_to(t, C10_AS_INTARRAYREF_SLOW(size));
  return t;
}
at::Tensor& set_storage(at::Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return t;
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& from) {
  return set_storage(t, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
at::Tensor& set_whole(at::Tensor& t, at::Storage storage) {
  int64_t numel = storage.nbytes() / t.element_size();
  return set_storage(t, std::move(storage), 0, {numel}, {1});
}
bool is_set_to(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}
bool may_swap_data(const at::Tensor&, const at::Tensor&) { return true; }  // p.data = of another device
void record_stream(at::Tensor& t, Stream stream) { Guard::keep(t.storage().data(), stream.id()); }
int64_t math_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const Maybe<at::Tensor>&, double, bool,
                       Maybe<double>, bool) {
  return 0;
}

// torch takes a fused dropout for PrivateUse1, which rounds in another order than the CPU's.
at::Tensor dropout(const at::Tensor& t, double p, bool train) {
  if (!train || p == 0 || !t.numel()) return t;
  return t.mul(at::empty_like(t).bernoulli_(1 - p).div_(1 - p));
}

// Copies -----------------------------------------------------------------------------------------------------

uint64_t hash(const char* p, size_t nbytes) {  // FNV-1a
  uint64_t all = 14695981039346656037u;
  for (size_t i = 0; i < nbytes; ++i) all = (all ^ (unsigned char)p[i]) * 1099511628211u;
  return all;
}

void copy_late(StreamThread* stream, const at::Tensor& from, const at::Tensor& to, bool up) {
  auto *into = real(to.data_ptr()), *out = real(from.data_ptr());
  size_t nbytes = from.nbytes();
  uint64_t before = up ? hash(out, nbytes) : 0;
  if (!up) std::memset(into, 0xff, nbytes);  // NaN until it has arrived
  stream->push([=] {
    stream->delay(copy_us);
    std::memcpy(into, out, nbytes);
    if (!up || hash(out, nbytes) == before) return;
    Lock lock(state_mutex);
    keep_failure("the host changed the source of an upload before it was over");
  });
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto* stream = stream_of(current);
  bool up = !on_sim(from), down = !on_sim(to);
  bool plain = from.dtype() == to.dtype() && from.is_contiguous() && to.is_contiguous() && from.sizes() == to.sizes();
  const char* what = up ? "an upload" : down ? "a download" : "a copy";
  bool late;
  {
    Lock lock(state_mutex);
    late = (up || down) && plain && non_blocking && from.numel() &&
           is_pinned(up ? from.data_ptr() : to.data_ptr(), from.nbytes());
    merge_into(stream->known, host);
    ++counts.copies;
    if (late) ++counts.late_copies;
    if (!up || late) check_access(stream, from.data_ptr(), span(from), false, what);
    if (!down || late) check_access(stream, to.data_ptr(), span(to), true, what);
  }
  if (late) {
    copy_late(stream, from, to, up);
  } else if (up || down) {
    auto source = up ? from.clone() : on_cpu(from), target = down ? to : on_cpu(to);
    stream->push([=] { target.copy_(source); });
    wait_on_host(stream);
  } else {
    stream->push([stream, source = on_cpu(from), target = on_cpu(to)] {
      stream->delay(kernel_us);
      target.copy_(source);
    });
  }
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar item(const at::Tensor& t) {
  auto* stream = stream_of(current);
  {
    Lock lock(state_mutex);
    merge_into(stream->known, host);
    check_access(stream, t.data_ptr(), span(t), false, "item");
  }
  wait_on_host(stream);
  return on_cpu(t).item();
}

// Registration -----------------------------------------------------------------------------------------------

// Where the CPU has a kernel of its own beside torch's composite one, this device needs it: else the operation
// is decomposed, and its bits differ (layer_norm's by 2e-7).
void register_beside_composites(torch::Library& m, const Strings& own) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    bool aten = name.name.rfind("aten::", 0) == 0;
    if (!aten || !op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    bool composite = false, views = false;
    for (auto key : {c10::DispatchKey::CompositeExplicitAutograd, c10::DispatchKey::CompositeImplicitAutograd,
                     c10::DispatchKey::CompositeExplicitAutogradNonFunctional})
      composite = composite || op->hasKernelForDispatchKey(key);
    for (auto& one : op->schema().returns()) views = views || (one.alias_info() && !one.alias_info()->isWrite());
    auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (composite && !views && !own.count(full))
      m.impl(full.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>()); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("dropout", dropout); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  Strings own;
  auto add = [&](const char* name, auto f) {
    own.insert(std::string("aten::") + name);
    m.impl(name, f);
  };
  add("empty.memory_format", empty);
  add("empty_strided", empty_strided);
  add("as_strided", as_strided);
  add("view", view);
  add("_reshape_alias", reshape_alias);
  add("unfold", unfold);
  add("resize_", resize_);
  add("_copy_from", copy_from);
  add("_copy_from_and_resize", copy_from_and_resize);
  add("_local_scalar_dense", item);
  add("set_.source_Tensor", set_tensor);
  add("set_.source_Storage", set_whole);
  add("set_.source_Storage_storage_offset", set_storage);
  add("is_set_to", is_set_to);
  add("record_stream", record_stream);
  add("_has_compatible_shallow_copy_type", may_swap_data);
  add("_fused_sdp_choice", math_attention);
  register_beside_composites(m, own);
}

std::string joined(const Strings& names) {
  std::string all;
  for (auto& one : names) all += one.substr(one.rfind(':') + 1) + " ";
  return all;
}

}  // namespace sim
