// Every form of csrc/core/mask.h against the rule itself, `visible`, and that against its words: all small calls.
#include "core/mask.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

using namespace attnjourney;

namespace {

constexpr int kMost = 6;  // keys, and rows

template <class Int>
struct Check {
  KeyRangesOf<Int> keys;
  Int first, last;  // rows

  void require(bool good, const char* what, Int key = 0, Int n = 0) const {
    if (good) return;
    std::printf(
        "%s: rows %d .. %d, keys from %d, %d of them; offset %d, window %d %d, prefix %d, length %d, %zu bytes\n", what,
        int(first), int(last), int(key), int(n), int(keys.offset), int(keys.left), int(keys.right), int(keys.prefix),
        int(keys.key_length), sizeof(Int));
    std::exit(1);
  }
  bool by_any(Int key) const {
    for (Int i = first; i <= last; i++)
      if (keys.visible(i, key)) return true;
    return false;
  }
  bool by_all(Int key) const {
    for (Int i = first; i <= last; i++)
      if (!keys.visible(i, key)) return false;
    return true;
  }

  void rule() const {
    for (Int i = first; i <= last; i++)
      for (Int key = 0; key < kMost + 2; key++) {
        const Int at = i + keys.offset;
        bool seen = at - key <= keys.left && key - at <= keys.right;
        if (key < keys.prefix) seen = true;
        if (key >= keys.key_length) seen = false;
        require(keys.visible(i, key) == seen, "visible", key);
      }
  }

  template <class F>
  void set(const VisibleKeysOf<Int>& x, const char* what, F&& seen) const {
    require(0 <= x.prefix && x.prefix <= x.begin && x.begin <= x.end, what);
    Int count = 0, lowest = -1, highest = -1;
    for (Int key = 0; key < kMost + 2; key++) {
      require(x.hides(key) == !seen(key), what, key);
      if (!seen(key)) continue;
      require(x.key(count) == key && x.number(key) == count, "number", key);
      if (count++ == 0) lowest = key;
      highest = key;
    }
    require(x.count() == count, "count");
    for (Int key = 0; key < kMost + 2; key++) {
      const bool last = key >= x.last().begin && key < x.last().end;
      require(last ? seen(key) : !seen(key) || (key < x.prefix && x.prefix < x.begin), "last", key);
      for (Int margin = 0; margin < 3; margin++) {
        bool near = false;  // to keys below it, and to keys above it
        for (Int k = key - margin; k <= key + margin; k++) near = near || (k >= 0 && k < x.end && seen(k));
        const bool inside = key >= x.prefix + margin && key < x.begin - margin;
        require(x.between(key, margin) == inside && (!inside || !near), "between", key, margin);
      }
    }
    require(count == 0 ? x.hull().empty() : x.hull().begin == lowest && x.hull().end == highest + 1, "hull");
    for (Int key = 0; key < kMost; key++)
      for (Int n = 1; key + n <= kMost + 1; n++) {
        bool every = true;
        for (Int k = key; k < key + n; k++) {
          every = every && seen(k);
          require(x.from(key).hides(k - key) == !seen(k), "from", key, n);
        }
        const bool in_both = key < x.prefix && key + n > x.prefix;
        require(x.one_holds(key, key + n) == (every && !in_both), "one_holds", key, n);
      }
  }

  void tile(Int key, Int n) const {
    const TileKeysOf<Int> t = keys.tile(first, last, key, n);
    Int lowest = n, highest = -1;
    bool whole = true, gap = false;  // a key that some row sees behind one that none does
    for (Int k = 0; k < n; k++) {
      whole = whole && by_all(key + k);
      if (k >= t.all_begin && k < t.all_end) require(by_all(key + k), "tile: all", key, n);
      if (!by_any(key + k)) continue;
      gap = gap || (highest >= 0 && highest + 1 < k);
      if (lowest == n) lowest = k;
      highest = k;
    }
    require(t.empty() == (highest < 0), "tile: empty", key, n);
    require(t.whole(n) == whole, "tile: whole", key, n);
    if (t.empty())
      return require(t.begin == 0 && t.all_begin == 0 && t.all_end == 0 && t.end == 0, "tile: none", key, n);
    require(t.begin == lowest && t.end == highest + 1, "tile", key, n);
    require(t.begin <= t.all_begin && t.all_begin <= t.all_end && t.all_end <= t.end, "tile: order", key, n);
    bool others = false;
    for (Int k = t.begin; k < t.end; k++) others = others || ((k < t.all_begin || k >= t.all_end) && by_all(key + k));
    require(!others || key < keys.prefix, "tile: more than all", key, n);
  }

  // of rows first .. last, those that see any and all of n keys
  void rows(Int key, Int n) const {
    const KeyRangeOf<Int> some = keys.rows(key, key + n - 1, first, last + 1),
                          every = keys.rows_of_all(key, key + n - 1, last + 1);
    for (Int i = first; i <= last; i++) {
      bool any = false, all = true;
      for (Int k = key; k < key + n; k++) any = any || keys.visible(i, k), all = all && keys.visible(i, k);
      const bool in_some = i >= some.begin && i < some.end;
      require(key + n <= keys.key_length || key >= keys.key_length ? in_some == any : in_some || !any, "rows", key, n);
      const bool in_window = key + n <= keys.prefix || key >= keys.prefix;
      const bool found = i >= every.begin && i < every.end;
      require(in_window ? found == all : all || !found, "rows_of_all", key, n);
    }
    require(some.begin >= first && some.end <= last + 1 && every.begin >= 0 && every.end <= last + 1, "rows: limits");
  }

  void pieces(const VisibleKeysOf<Int>& any, const VisibleKeysOf<Int>& all) const {
    for (Int number = 0; number < any.count(); number++) {
      bool every = true;
      for (Int n = 1; number + n <= any.count(); n++) {
        const Int key = any.key(number + n - 1);
        every = every && by_all(key) && (number < any.prefix) == (number + n - 1 < any.prefix);
        require(any.one_piece_of(all, number, n) == every, "one_piece_of", number, n);
      }
    }
  }

  void run() const {
    rule();
    set(keys.any(first, last), "any", [&](Int key) { return by_any(key); });
    set(keys.all(first, last), "all", [&](Int key) { return by_all(key); });
    pieces(keys.any(first, last), keys.all(first, last));
    if (first == last) set(keys.row(first), "row", [&](Int key) { return by_any(key); });
    require(keys.any(first, last).count() <= keys.most(last - first + 1), "most");
    for (Int key = 0; key < keys.key_length + 1; key++)
      for (Int n = 1; key + n <= kMost; n++) tile(key, n), rows(key, n);
  }
};

template <class Int>
void check() {
  using Ranges = KeyRangesOf<Int>;
  long count = 0;
  for (Int length = 0; length <= kMost; length++)
    for (Int prefix = 0; prefix <= length + 1; prefix++)
      for (Int offset = -kMost; offset <= kMost; offset++)
        for (Int left : {Int(0), Int(1), Int(3), Ranges::unbounded})
          for (Int right : {Int(0), Int(1), Int(3), Ranges::unbounded}) {
            Ranges keys{.offset = offset, .left = left, .right = right, .prefix = prefix};
            keys.set_length(length);
            Check<Int>{keys, 0, 0}.require(keys.prefix == (prefix < length ? prefix : length), "set_length");
            const bool bounded[] = {left < kMost, right < kMost};
            Check<Int>{keys, 0, 0}.require(
                keys.bounded() == (bounded[0] || bounded[1]) && keys.bounded_left() == bounded[0], "bounded");
            const KeyRangesOf<int> narrow = keys.narrow();
            for (Int first = 0; first < kMost; first++)
              for (Int last = first; last < kMost; last++, count++) {
                Check<Int>{keys, first, last}.run();
                for (Int key = 0; key < kMost; key++)
                  Check<Int>{keys, first, last}.require(
                      narrow.visible(int(first), int(key)) == keys.visible(first, key), "narrow", key);
              }
          }
  std::printf("%ld\n", count);
}

}  // namespace

int main() {
  check<int>();
  check<int64_t>();
}
