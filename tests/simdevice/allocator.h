// The caching allocator, whose blocks are reused in their stream's order: see device.cpp.
namespace sim {

std::multimap<std::pair<int, size_t>, char*> spare;      // by stream and bytes
std::map<const char*, std::vector<Event>> in_use_until;  // of spare blocks: when other streams are done with them
std::map<const char*, size_t> still_used;                // bytes of those of them that are counted until then
size_t top = 0, allocated = 0, peak = 0;
size_t page_locked_peak = 0;  // bytes of host memory
constexpr size_t BLOCK = 512;  // as CUDA's allocator rounds

// Stops counting the freed blocks that other streams are done with. Under state_mutex.
void settle() {
  for (auto it = still_used.begin(); it != still_used.end();) {
    auto& events = in_use_until[it->first];
    bool over = std::all_of(events.begin(), events.end(), [](auto& event) { return event->query(); });
    if (over) allocated -= it->second;
    it = over ? still_used.erase(it) : std::next(it);
  }
}

void free_block(void* p) {
  if (!p) return;
  std::vector<StreamThread*> users;
  {
    Lock lock(state_mutex);
    for (int user : blocks.at((char*)p).users) users.push_back(all_streams()[user]);
  }
  std::vector<Event> events;
  for (auto* user : users) events.push_back(record_event(user));
  Lock lock(state_mutex);
  auto& block = blocks.at((char*)p);
  block.live = false;
  block.users.clear();
  in_use_until[block.p] = events;
  still_used[block.p] = block.nbytes;
  settle();
  spare.emplace(std::pair(block.stream, block.nbytes), block.p);
}

// A spare block of this stream and size that no other stream uses any more, or nullptr. Under state_mutex.
char* reused_block(int stream, size_t nbytes) {
  auto [it, end] = spare.equal_range({stream, nbytes});
  for (; it != end; ++it) {
    auto& events = in_use_until[it->second];
    if (!std::all_of(events.begin(), events.end(), [](auto& event) { return event->query(); })) continue;
    auto* p = it->second;
    if (auto used = still_used.find(p); used != still_used.end()) allocated -= used->second, still_used.erase(used);
    for (auto& event : events) merge_into(host, event->known);
    in_use_until.erase(p);
    spare.erase(it);
    return p;
  }
  return nullptr;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &free_block, DEVICE};
    nbytes = (nbytes + BLOCK - 1) / BLOCK * BLOCK;
    StreamThread* stream = stream_of(current);
    char* p;
    {
      Lock lock(state_mutex);
      settle();
      p = reused_block(current, nbytes);
      if (!p) {
        p = memory().hidden + top;
        top += nbytes;
        TORCH_CHECK(top <= SPACE_NBYTES, "sim: out of memory");
      }
      blocks[p] = Block{p, nbytes, current, {}, true};
      allocated += nbytes;
      peak = std::max(peak, allocated);
      merge_into(stream->known, host);
      check_access(stream, p, nbytes, true, "a new owner");
    }
    stream->push([p, nbytes] { std::memset(real(p), 0xff, nbytes); });  // NaN
    return {p, p, &free_block, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(real(to), real(from), n); }
};
Allocator allocator;
REGISTER_ALLOCATOR(SIM, &allocator);

}  // namespace sim
