// The happens-before check of every access: see device.cpp. All functions are called under state_mutex.
namespace sim {

struct Access {
  int stream;
  uint64_t n;  // the stream's n-th access
  const char *from, *to;
  bool write;
  const char* what;
};
struct Block {
  char* p;
  size_t nbytes;
  int stream;           // the stream that allocated it
  std::set<int> users;  // other streams, by record_stream
  bool live;
};
std::map<const char*, std::vector<Access>> accesses;  // by the start of the block or the pinned range around them
std::map<const char*, Block> blocks;                  // of device memory, by address; live or spare
std::map<const char*, size_t> pinned;                 // bytes of page-locked host memory, by address

template <class Map>
typename Map::iterator containing(Map& map, const char* p) {
  auto it = map.upper_bound(p);
  return it == map.begin() ? map.end() : --it;
}

bool is_pinned(const void* p, size_t nbytes) {
  auto it = containing(pinned, (const char*)p);
  return it != pinned.end() && (const char*)p + nbytes <= it->first + it->second;
}

void report_race(const std::string& what) {
  keep_failure(what);
  TORCH_CHECK(!strict, "race: ", what);
}

std::string described(const char* what, int stream, bool write) {
  return std::string(what) + " on stream " + std::to_string(stream) + (write ? ", which writes" : ", which reads");
}

// The start of the block or the pinned range that holds the bytes; reports device memory that is not allocated.
const char* owner_of(const char* from, const char* to, const std::string& user) {
  if (!on_device(from)) {
    auto it = containing(pinned, from);
    return it != pinned.end() && from < it->first + it->second ? it->first : from;
  }
  auto it = containing(blocks, from);
  if (it == blocks.end() || !it->second.live || to > it->second.p + it->second.nbytes) {
    report_race(user + ", uses memory that is not allocated");
    return from;
  }
  return it->first;
}

// Notes an access that is about to be queued, and reports it unless every access that it conflicts with is
// certain to be over by then.
void check_access(StreamThread* stream, const void* p, size_t nbytes, bool write, const char* what) {
  if (!nbytes) return;
  auto from = (const char*)p, to = from + nbytes;
  auto& list = accesses[owner_of(from, to, described(what, stream->id, write))];
  std::vector<Access> kept;
  for (auto& one : list) {
    bool meets = one.to > from && one.from < to;
    bool before = one.stream == stream->id || stream->known[one.stream] >= one.n;
    if (meets && (one.write || write) && !before)
      report_race(described(what, stream->id, write) + ", is not ordered behind " +
                  described(one.what, one.stream, one.write));
    bool inside = one.from >= from && one.to <= to;
    bool superseded = inside && before && (write || (!one.write && one.stream == stream->id));
    if (!superseded) kept.push_back(one);
  }
  list.swap(kept);
  list.push_back({stream->id, ++stream->known[stream->id], from, to, write, what});
}

// Whether the host takes pinned memory back although a copy that it has not waited for may use it.
bool is_taken_too_early(const char* p, const char* what) {
  bool early = false;
  for (auto& one : accesses[p])
    if (host[one.stream] < one.n) {
      keep_failure(std::string("host memory is ") + what + " while " + one.what + " on stream " +
                   std::to_string(one.stream) + " may still use it");
      early = true;
    }
  accesses.erase(p);
  return early;
}

}  // namespace sim
