// What was made lately, by what it was made from: a fixed number of places, each held by the newest that falls on it.
#pragma once
#include <array>
#include <cstddef>
#include <optional>
#include <utility>

namespace attnjourney {

template <class Key, class Value, size_t Places>
class Recent {
 public:
  // make() -> Value; what it throws leaves everything as it was. The reference holds until the next call.
  template <class Make>
  const Value& get(const Key& key, size_t hash, Make&& make) {
    auto& held = held_[hash % Places];
    if (!held || !(held->first == key)) held.emplace(key, make());
    return held->second;
  }

 private:
  std::array<std::optional<std::pair<Key, Value>>, Places> held_;
};

}  // namespace attnjourney
