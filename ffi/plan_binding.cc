// Python's view of the planner: numpy arrays and named facts in, the packed plan out. No decisions live here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "plan/capacity.h"
#include "plan/cost.h"
#include "plan/planner.h"

namespace nb = nanobind;

namespace jaxinfer {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableInts = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ClassTuple = std::tuple<int32_t, bool, int32_t, int32_t>;  // tile, packed, num_queues, num_ctas
using CostTuple =
    std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;  // fixed, alpha, beta, floor, weight

// Python has checked its arguments with better words (jaxinfer/plan.py); these guard the planner's bounds.
void require(bool ok, const char* name, int64_t got, const char* expected) {
  if (ok) return;
  throw std::invalid_argument(std::string("Planner: ") + name + " is " + std::to_string(got) + ", expected " +
                              expected);
}

// The static facts of a plan; called once per step with the arrays of the layout.
class Planner {
 public:
  explicit Planner(const PlanRequest& request) : request_(request) {}

  const PlanFormat& format() const { return request_.format; }

  void plan(Ints q_start, Ints q_len, Ints kv_start, Ints kv_indices, Ints kv_len, Ints kv_offset, Ints q_pos,
            std::optional<Ints> block_pos, std::optional<int64_t> num_pages, MutableInts out) const {
    check("q_start", q_start, request_.num_rows);
    check("q_len", q_len, request_.num_rows);
    check("kv_start", kv_start, request_.num_rows);
    check("kv_len", kv_len, request_.num_rows);
    check("kv_offset", kv_offset, request_.num_rows);
    check("q_pos", q_pos, request_.num_tokens);
    if (block_pos) check("block_pos", *block_pos, static_cast<int64_t>(kv_indices.size()));
    if (static_cast<int64_t>(out.size()) != format().num_words) {
      throw std::invalid_argument("plan: out has " + std::to_string(out.size()) + " words, expected " +
                                  std::to_string(format().num_words));
    }
    LayoutView layout{};
    layout.q_start = q_start.data();
    layout.q_len = q_len.data();
    layout.kv_start = kv_start.data();
    layout.kv_indices = kv_indices.data();
    layout.kv_len = kv_len.data();
    layout.kv_offset = kv_offset.data();
    layout.q_pos = q_pos.data();
    layout.block_pos = block_pos ? block_pos->data() : nullptr;
    layout.kv_indices_capacity = static_cast<int64_t>(kv_indices.size());
    layout.num_pages = num_pages;
    make_plan(layout, request_, out.data());
  }

 private:
  static void check(const char* name, const Ints& array, int64_t expected) {
    if (static_cast<int64_t>(array.size()) == expected) return;
    throw std::invalid_argument(std::string("layout.") + name + " has " + std::to_string(array.size()) +
                                " entries, expected " + std::to_string(expected));
  }

  PlanRequest request_;
};

// Planner's constructor.
void make_planner(Planner* self, const std::vector<ClassTuple>& classes, int32_t num_tokens, int32_t num_rows,
                  int32_t num_layouts, int64_t kv_capacity, int32_t page_size, bool contiguous,
                  int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim_qk, int32_t head_dim_vo,
                  int32_t element_size, bool causal, std::optional<int32_t> window_left,
                  std::optional<int32_t> window_right, bool runs, bool side_by_side, bool batch_invariant,
                  int32_t split_tokens, const std::optional<std::vector<CostTuple>>& costs) {
  require(num_tokens >= 0, "num_tokens", num_tokens, "at least 0");
  require(num_rows >= 0, "num_rows", num_rows, "at least 0");
  require(num_layouts >= 1, "num_layouts", num_layouts, "at least 1");
  require(!batch_invariant || num_layouts == 1, "num_layouts", num_layouts, "1 with batch_invariant");
  require(kv_capacity >= 0, "kv_capacity", kv_capacity, "at least 0");
  require(page_size >= 1, "page_size", page_size, "at least 1");
  require(num_kv_heads >= 1, "num_kv_heads", num_kv_heads, "at least 1");
  require(num_qo_heads >= 1 && num_qo_heads % num_kv_heads == 0, "num_qo_heads", num_qo_heads,
          "a positive multiple of num_kv_heads");
  require(split_tokens >= 16 && split_tokens % 16 == 0, "split_tokens", split_tokens,
          "a positive multiple of 16");
  const auto num_classes = static_cast<int64_t>(classes.size());
  require(num_classes >= 1 && num_classes <= kMaxClasses, "the number of classes", num_classes, "1 or 2");
  require(!costs || costs->size() == classes.size(), "the number of costs",
          costs ? static_cast<int64_t>(costs->size()) : 0, "one set for each class");
  PlanRequest request{};
  request.num_tokens = num_tokens;
  request.num_rows = num_rows;
  request.num_layouts = num_layouts;
  request.kv_capacity = kv_capacity;
  request.page_size = page_size;
  request.contiguous = contiguous;
  request.num_qo_heads = num_qo_heads;
  request.num_kv_heads = num_kv_heads;
  request.head_dim_qk = head_dim_qk;
  request.head_dim_vo = head_dim_vo;
  request.element_size = element_size;
  request.schedule = runs ? Schedule::kRuns : Schedule::kLpt;
  request.side_by_side = side_by_side;
  request.batch_invariant = batch_invariant;
  request.split_tokens = split_tokens;
  request.clip.causal = causal;
  request.clip.window_left = window_left;
  request.clip.window_right = window_right;
  request.format.num_classes = static_cast<int32_t>(num_classes);
  for (int32_t c = 0; c < request.format.num_classes; ++c) {
    ClassFormat& cls = request.format.classes[c];
    const auto [tile, packed, num_queues, num_ctas] = classes[c];
    cls = ClassFormat{};
    cls.tile = tile;
    cls.packed = packed ? 1 : 0;
    cls.num_queues = num_queues;
    cls.num_ctas = num_ctas;
    require(num_queues >= 1 && num_queues < 1 << 16, "num_queues", num_queues, "in [1, 65535]");
    require(num_ctas >= 1, "num_ctas", num_ctas, "at least 1");
    const int32_t tile_tokens = request.tokens_per_tile(c);
    require(tile_tokens >= 1, "the number of tokens in a tile", tile_tokens, "at least 1");
    require(c == 0 || tile_tokens > request.tokens_per_tile(c - 1), "the number of tokens in a tile",
            tile_tokens, "more than in the class before");
    request.costs[c] = default_costs(request.schedule, cls, request.group_size());
    if (costs) {
      const auto [fixed, alpha, beta, floor, weight] = (*costs)[c];
      Costs& given = request.costs[c];
      given.fixed = fixed;
      given.alpha = alpha;
      given.beta = beta;
      given.block = 1;  // given costs are exact
      given.floor = floor;
      given.weight = weight;
      require(fixed >= 0, "costs: fixed", fixed, "at least 0");
      require(alpha >= 0, "costs: alpha", alpha, "at least 0");
      require(beta >= 1, "costs: beta", beta, "at least 1");
      require(weight >= 1, "costs: weight", weight, "at least 1");
      require(floor >= 32 && floor % 16 == 0, "costs: floor", floor, "a multiple of 16, at least 32");
    }
  }
  fill_capacities(&request);
  new (self) Planner(request);
}

}  // namespace

void bind_plan(nb::module_& m) {
  // jaxinfer.plan caches planners until the interpreter ends, which nanobind would report as leaks.
  nb::set_leak_warnings(false);
  m.def("choose_num_queues", &choose_num_queues, nb::arg("num_ctas"), nb::arg("heads"),
        "Smallest number of queues whose workers leave at most 2% of the CTAs of their last round idle.");
  nb::class_<Planner>(m, "Planner", "A plan's static facts with capacities; called with a layout's arrays.")
      .def("__init__", &make_planner, nb::kw_only(), nb::arg("classes"), nb::arg("num_tokens"),
           nb::arg("num_rows"), nb::arg("num_layouts"), nb::arg("kv_capacity"), nb::arg("page_size"),
           nb::arg("contiguous"), nb::arg("num_qo_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim_qk"),
           nb::arg("head_dim_vo"), nb::arg("element_size"), nb::arg("causal"), nb::arg("window_left").none(),
           nb::arg("window_right").none(), nb::arg("runs"), nb::arg("side_by_side"),
           nb::arg("batch_invariant"), nb::arg("split_tokens"), nb::arg("costs") = nb::none())
      .def("__call__", &Planner::plan, nb::arg("q_start").noconvert(), nb::arg("q_len").noconvert(),
           nb::arg("kv_start").noconvert(), nb::arg("kv_indices").noconvert(), nb::arg("kv_len").noconvert(),
           nb::arg("kv_offset").noconvert(), nb::arg("q_pos").noconvert(), nb::arg("block_pos").none(),
           nb::kw_only(), nb::arg("num_pages").none(), nb::arg("out").noconvert())
      .def_prop_ro("num_words", [](const Planner& p) { return p.format().num_words; })
      .def_prop_ro("merge_capacity", [](const Planner& p) { return p.format().merge_capacity; })
      .def_prop_ro("slot_capacity", [](const Planner& p) { return p.format().slot_capacity; })
      .def_prop_ro("item_capacity",
                   [](const Planner& p) {
                     nb::list out;
                     for (int32_t c = 0; c < p.format().num_classes; ++c)
                       out.append(p.format().classes[c].item_capacity);
                     return nb::tuple(out);
                   })
      .def_prop_ro("items", [](const Planner& p) {  // word offset of each class's items
        nb::list out;
        for (int32_t c = 0; c < p.format().num_classes; ++c) out.append(p.format().classes[c].items);
        return nb::tuple(out);
      });
}

}  // namespace jaxinfer
