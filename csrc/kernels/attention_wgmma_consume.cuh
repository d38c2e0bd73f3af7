// A consumer warpgroup of the warpgroup kernel: 64 query rows of a tile against the ring of KV blocks that
// all consumers of the CTA read and the producers (attention_wgmma_load.cuh) fill.
//
// An item: the scores of its last block and their softmax; then, block by block towards its first, a consumer
// starts the product of Q with that block's keys and the product of the weights at hand with their values,
// and the block's softmax runs beside the latter. Consumers take turns at starting products, so that the
// softmax of one also runs beside the products of the others. At last the state is written: o and lse, or a
// partial of both.
#pragma once

#include "kernels/attention_wgmma_load.cuh"
#include "kernels/attention_wgmma_store.cuh"
#include "kernels/attention_wgmma_weights.cuh"
#include "kernels/sm90_wgmma.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

// Config of the consumers' share of a CTA, for what counts its threads.
template <class Config>
struct ConsumerConfig : Config {
  static constexpr int kNumThreads = WgmmaShared<Config>::kConsumers * kWarpgroupThreads;
};

template <class Config, class Variant>
class WgmmaConsumer {
  using Type = Element<Config::kDType>;
  using Shared = WgmmaShared<Config>;
  static constexpr int kConsumers = Shared::kConsumers;
  static constexpr int kBlock = Config::kBlockKV;
  static constexpr int kColumns = kBlock / 8;  // pieces of eight columns
  static constexpr int kPieces = Config::kHeadDimVo / 8;
  static constexpr bool kPaged = !Config::kContiguous;
  static constexpr bool kGather = kPaged && Config::kPageBox == 0;
  static constexpr bool kPositionRule = (Config::kRules & kPositionRules) != 0;
  static constexpr bool kPingPong = Config::kPingPong != 0;
  // Beside the first product where registers allow that.
  static constexpr bool kClearsBeside = kConsumers == 2 && kPieces <= 16;
  static constexpr int kEarly = Variant::kSoftmax ? Config::kEarlyColumns / 8 : 0;
  // Rows that one word of present columns describes.
  static constexpr int kRowsPerWord = kGather ? kBlock / 4 : 32;
  static_assert(!Variant::kQuery && !Variant::kKey && !Variant::kValue,
                "holes of the portable template alone");

 public:
  JAXINFER_DEVICE WgmmaConsumer(const AttentionParams& params, int cls, const VariantOperands& operands,
                                char* memory)
      : params_(params),
        operands_(operands),
        cls_(cls),
        memory_(memory),
        state_(reinterpret_cast<ConsumerState*>(memory + Shared::kConsumerStates)[threadIdx.x >> 5]),
        rows_{state_.cursor, params_.group_divider},
        barriers_{shared_address(memory + Shared::kBarriers)},
        consumer_(__shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0)),
        k_slot_(0),
        v_slot_(0) {}

  JAXINFER_DEVICE void run() {
    ItemCursor<Config> cursor(params_, cls_, 1, state_.cursor);
    state_.query_parity = 0;
    if (kPingPong && consumer() == 0) named_arrive(kTurn, 2 * kWarpgroupThreads);
    while (cursor.next()) {
      if (state_.cursor.item.bsr_row < 0) {
        write_empty<ConsumerConfig<Config>>(params_, state_.cursor.item, state_.cursor.head);
      } else {
        run_item();
      }
    }
  }

  // Both read again at every use: registers are for the products.
  static JAXINFER_DEVICE int lane() { return fresh_thread_index() & 31; }
  static JAXINFER_DEVICE int warp() { return fresh_thread_index() >> 5; }
  // Tile row of this thread's fragment row r.
  static JAXINFER_DEVICE int tile_row(int r) { return warp() * 16 + (lane() >> 2) + r * 8; }
  JAXINFER_DEVICE const ItemRows<Config::kPacked>& rows() const { return rows_; }
  JAXINFER_DEVICE const Item& item() const { return state_.cursor.item; }

  JAXINFER_DEVICE float logit_scale() const { return fabsf(params_.variant.sm_scale); }
  // Of score fragments to logits and to base-2 exponents; the variant's fragments are logits already.
  JAXINFER_DEVICE float fragment_scale() const { return Variant::kLogits ? 1.0f : logit_scale(); }
  JAXINFER_DEVICE float scale() const { return exponent_scale(fragment_scale()); }

  JAXINFER_DEVICE Row make_row(int i) const {
    const int token = item().token_begin + rows_.token(i);
    return Row{item().bsr_row, token, __ldg(params_.q_pos + token), rows_.qo_head(i), rows_.kv_head()};
  }

 private:
  // Barrier ids; 0 is the CTA's own. A warpgroup waits for its turn on kTurn + its number; kGroup is its own.
  static constexpr int kTurn = 1;
  static constexpr int kGroup = kTurn + kConsumers;

  // Three consumers have no register to spare even for this.
  JAXINFER_DEVICE int consumer() const {
    return kConsumers == 2 ? consumer_ : fresh_thread_index() / kWarpgroupThreads;
  }
  // Of fragment row r. Idle rows copy a real one; their results are not read.
  JAXINFER_DEVICE Row hole_row(int r) const { return make_row(min(tile_row(r), rows_.num_rows() - 1)); }

  JAXINFER_DEVICE void run_item() {
    const Item bounded = bounded_item<Config>(params_, state_.cursor);
    const BlockRange<Config> blocks(bounded);
    state_.kv_begin = bounded.kv_begin;
    state_.kv_end = bounded.kv_end;
    WgmmaStore<Config, Variant, WgmmaConsumer> store(params_, operands_, *this, weights_.state(), o_);
    if (blocks.count > 0) {
      first_block(blocks);
#pragma unroll 1
      for (int i = blocks.count - 2; i >= 0; --i) next_block(blocks.begin(i), i == 0);
      wait_values();
      start_values();
      store.write_sums();
      wait_products<0>();
      pin_registers(o_);
      release_values();
    } else {
      clear();
      store.write_sums();
    }
    store.write_output();
  }

  JAXINFER_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < 4 * kPieces; ++i) o_[i] = 0.0f;
    weights_.clear();
  }

  // Columns that every row of this warp sees, to shared memory, and those that all see.
  JAXINFER_DEVICE void find_ranges() {
    int begin = state_.kv_begin;
    int end = state_.kv_end;
    if constexpr (kPositionRule) {
      const int offset = state_.kv_begin < state_.kv_end ? __ldg(params_.kv_offset + item().bsr_row) : 0;
      const int i = warp() * 16 + (lane() & 15);
      const bool positions = kPaged && params_.block_pos != nullptr;
      if (positions) {
        begin = kInt32Min;
        end = kInt32Max;
      }
      if (i < rows_.num_rows()) {
        const int token = item().token_begin + rows_.token(i);
        const Visible seen = visible_positions<Config::kRules>(params_.variant, __ldg(params_.q_pos + token));
        const int64_t shift = positions ? 0 : offset;
        begin = static_cast<int>(max(int64_t{begin}, min(seen.first - shift, int64_t{kInt32Max})));
        end = static_cast<int>(min(int64_t{end}, max(seen.last - shift + 1, int64_t{kInt32Min})));
      }
      ranges()[i] = ColumnRange{begin, end};
      state_.kv_offset = offset;
      begin = __reduce_max_sync(kFullWarp, begin);
      end = __reduce_min_sync(kFullWarp, end);
    } else if constexpr (Variant::kLogits || Variant::kMask) {
      state_.kv_offset = state_.kv_begin < state_.kv_end ? __ldg(params_.kv_offset + item().bsr_row) : 0;
    }
    clear_begin_ = begin;
    clear_end_ = end;
    __syncwarp();
  }
  JAXINFER_DEVICE ColumnRange* ranges() const {
    return reinterpret_cast<ColumnRange*>(memory_ + Shared::kRanges);
  }
  // Of fragment row r.
  JAXINFER_DEVICE ColumnRange range(int r) const {
    return kPositionRule ? ranges()[tile_row(r)] : ColumnRange{state_.kv_begin, state_.kv_end};
  }

  // ---- products ----

  JAXINFER_DEVICE void start_scores(float (&s)[4 * kColumns]) {
    const uint32_t q =
        matrix_descriptor(shared_address(memory_ + Shared::kQuery) + consumer() * 64 * kPanelBytes, 16);
    const uint32_t k =
        matrix_descriptor(shared_address(memory_ + Shared::kK) + k_slot_.stage() * Shared::kKBytes, 16);
    pin_registers(s);
    fence_products();
#pragma unroll
    for (int i = 0; i < Config::kHeadDimQk / 16; ++i) {
      Wgmma<kBlock>::template shared<Config::kDType>(
          s, q + (i / 4) * (Shared::kQueryPanel >> 4) + (i % 4) * 2,
          k + (i / 4) * (Shared::kKvPanel >> 4) + (i % 4) * 2, i != 0);
    }
    commit_products();
  }
  JAXINFER_DEVICE void start_values() {
    const uint32_t v = matrix_descriptor(
        shared_address(memory_ + Shared::kV) + v_slot_.stage() * Shared::kVBytes, Shared::kKvPanel);
    pin_registers(o_);
    fence_products();
#pragma unroll
    for (int i = 0; i < kBlock / 16; ++i) {
      Wgmma<Config::kHeadDimVo>::template registers<Config::kDType>(
          o_, p_[4 * i], p_[4 * i + 1], p_[4 * i + 2], p_[4 * i + 3], v + i * (16 * kPanelBytes >> 4));
    }
    commit_products();
  }

  JAXINFER_DEVICE void wait_keys() { wait_barrier(barriers_.k_full(k_slot_.stage()), k_slot_.parity()); }
  JAXINFER_DEVICE void wait_values() { wait_barrier(barriers_.v_full(v_slot_.stage()), v_slot_.parity()); }
  JAXINFER_DEVICE void release_keys(bool last) {
    if constexpr (kPaged) __syncwarp();  // every lane has read which columns are there
    if (lane() == 0) {
      arrive(barriers_.k_empty(k_slot_.stage()));
      if (last) arrive(barriers_.query_empty(consumer()));
    }
    k_slot_.advance();
  }
  JAXINFER_DEVICE void release_values() {
    if (lane() == 0) arrive(barriers_.v_empty(v_slot_.stage()));
    v_slot_.advance();
  }

  // What the copy engine brought behind the item's last row, in its first block, is whatever lies there, and
  // 0 * NaN would reach the sums. Every warpgroup writes these zeros, all the same ones, so that none has to
  // wait for another.
  JAXINFER_DEVICE void clear_tail(int begin) {
    const int tail = state_.kv_end - begin;
    if (kGather || tail >= kBlock) return;
    wait_values();
    // A page box that is not there at all is zeros already.
    const int end = Config::kPageBox > 0 ? (tail + Config::kPageBox - 1) & ~(Config::kPageBox - 1) : kBlock;
    const uint32_t v = shared_address(memory_ + Shared::kV) + v_slot_.stage() * Shared::kVBytes;
    const int chunks = (end - tail) * 8;
#pragma unroll 1
    for (int i = fresh_thread_index() % kWarpgroupThreads; i < chunks * Shared::kPanelsVo;
         i += kWarpgroupThreads) {
      const int panel = i / chunks;
      const int in_panel = i - panel * chunks;
      store_shared(v + panel * Shared::kKvPanel + (tail * 8 + in_panel) * 16, make_uint4(0, 0, 0, 0));
    }
    fence_tensor_proxy();
    named_sync(kGroup + consumer(), kWarpgroupThreads);
  }

  // What an item needs besides its products is found beside the first of them.
  JAXINFER_DEVICE void first_block(const BlockRange<Config>& blocks) {
    const int begin = blocks.begin(blocks.count - 1);
    const bool split = (64 % (Config::kPacked ? params_.group_divider.divisor : 1)) == 0;
    const uint32_t parity = state_.query_parity;
    wait_barrier(barriers_.query_full(split ? consumer() : 0), parity);
    __syncwarp();
    state_.query_parity = parity ^ 1;
    float s[4 * kColumns];
    wait_keys();
    start_scores(s);
    const bool all_there = all_present();
    find_ranges();
    clear();
    if constexpr (kClearsBeside) clear_tail(begin);
    wait_products<0>();
    pin_registers(s);
    finish_scores(begin, s, all_there, blocks.count == 1);
    if constexpr (Variant::kSoftmax) {
      weights_.first(s, scale(), p_);
    } else {
      weights_.plain(s, p_);
    }
    if constexpr (!kClearsBeside) clear_tail(begin);
  }

  JAXINFER_DEVICE void next_block(int begin, bool last) {
    float s[4 * kColumns];
    wait_keys();
    if constexpr (kPingPong) named_sync(kTurn + consumer(), 2 * kWarpgroupThreads);
    start_scores(s);
    wait_values();
    start_values();
    if constexpr (kPingPong) {
      named_arrive(kTurn + (consumer() + 1 == kConsumers ? 0 : consumer() + 1), 2 * kWarpgroupThreads);
    }
    const bool all_there = all_present();
    wait_products<1>();
    pin_registers(s);
    finish_scores(begin, s, all_there, last);
    if constexpr (kEarly > 0) {
      weights_.start(s, scale());
      split_block();
    }
    wait_products<0>();
    pin_registers(o_);
    release_values();
    if constexpr (Variant::kSoftmax) {
      if constexpr (kEarly == 0) weights_.start(s, scale());
      weights_.finish(s, scale(), p_, o_);
    } else {
      weights_.plain(s, p_);
    }
  }

  // ---- scores ----

  // Position of column c of the block.
  JAXINFER_DEVICE int position(int begin, int c) const {
    return kPaged && params_.block_pos != nullptr ? positions()[c] : state_.kv_offset + begin + c;
  }
  JAXINFER_DEVICE const int* positions() const {
    return reinterpret_cast<const int*>(memory_ + Shared::kPositions) + k_slot_.stage() * kBlock;
  }
  // In lane 0, which gives the slot back: whether every column of the block whose keys came is there. True in
  // other lanes: racecheck would not see that their reads end before lane 0 arrives, see describe().
  JAXINFER_DEVICE bool all_present() const {
    if (!kPaged || lane() != 0) return true;
    const uint4 words = reinterpret_cast<const uint4*>(memory_ + Shared::kPresent)[k_slot_.stage()];
    return (words.x & words.y & words.z & words.w) == ~0u;
  }

  // Logits and masks of a block whose products are done; then its keys are given back. `all_there` was read
  // before the wait for the products, which hides the way to shared memory.
  JAXINFER_DEVICE void finish_scores(int begin, float (&s)[4 * kColumns], bool all_there, bool last) {
    if constexpr (kPaged) all_there = __all_sync(kFullWarp, all_there);
    if constexpr (Variant::kLogits || !Variant::kSoftmax) {
      apply_logits(begin, s);
    } else if (params_.variant.sm_scale < 0.0f) {
#pragma unroll
      for (int i = 0; i < 4 * kColumns; ++i) s[i] = -s[i];
    }
    if constexpr (Variant::kMask) {
      apply_mask(begin, s);
    } else if (!all_there || by_position() || begin < clear_begin_ || begin + kBlock > clear_end_) {
      hide_columns(begin, s, all_there);
    }
    release_keys(last);
  }

  JAXINFER_DEVICE bool by_position() const { return kPaged && kPositionRule && params_.block_pos != nullptr; }
  // What is not a whole block of columns that all rows see. By itself, because all other blocks would wait
  // for what it reads.
  JAXINFER_DEVICE void hide_columns(int begin, float (&s)[4 * kColumns], bool all_there) const {
    if (all_there && !by_position()) {
      apply_ranges(begin, s);
      return;
    }
    const bool inside = begin >= state_.kv_begin && begin + kBlock <= state_.kv_end;
    // Positions ascend along a row's list.
    if (all_there && inside && positions()[0] >= clear_begin_ && positions()[kBlock - 1] < clear_end_) return;
    apply_mask(begin, s);
  }

  // Hides the columns outside of every row's range.
  JAXINFER_DEVICE void apply_ranges(int begin, float (&s)[4 * kColumns]) const {
    const int first = begin + 2 * (lane() & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const ColumnRange seen = range(r);
      const int low = seen.begin - first;
      const int high = seen.end - first;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = 8 * j + e;
          float& x = s[4 * j + 2 * r + e];
          x = c >= low && c < high ? x : hidden_score<Variant::kSoftmax>();
        }
      }
    }
  }

  // The same, for columns that may be missing or lie anywhere, and for the variant's mask: first what to
  // keep, a bit per column, in a loop that needs few registers; then the scores.
  JAXINFER_DEVICE void apply_mask(int begin, float (&s)[4 * kColumns]) const {
    const bool by_position = this->by_position();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const ColumnRange seen = range(r);
      const Row row = Variant::kMask ? hole_row(r) : Row{};
      const Variant variant(params_, operands_, row);
      uint32_t keep = 0;
#pragma unroll 1
      for (int i = 0; i < 2 * kColumns; ++i) {
        const int c = 2 * (lane() & 3) + (i >> 1) * 8 + (i & 1);
        const int index = begin + c;
        bool kept = index >= state_.kv_begin && index < state_.kv_end && (!kPaged || is_present(c));
        int kv_pos = 0;
        if (kPositionRule || Variant::kMask) kv_pos = position(begin, c);
        const int at = by_position ? kv_pos : index;
        kept = kept && at >= seen.begin && at < seen.end;
        if constexpr (Variant::kMask) kept = kept && variant.mask(row, Col{kv_pos, index});
        keep |= static_cast<uint32_t>(kept) << i;
      }
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        float& x = s[4 * (i >> 1) + 2 * r + (i & 1)];
        x = (keep >> i & 1) != 0 ? x : hidden_score<Variant::kSoftmax>();
      }
    }
  }
  JAXINFER_DEVICE bool is_present(int c) const {
    const uint32_t* const words =
        reinterpret_cast<const uint32_t*>(memory_ + Shared::kPresent) + k_slot_.stage() * 4;
    return (words[c / kRowsPerWord] >> (c % kRowsPerWord) & 1) != 0;
  }

  // Products to logits, through the variant where it wants that.
  JAXINFER_DEVICE void apply_logits(int begin, float (&s)[4 * kColumns]) const {
    const int first = 2 * (lane() & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row row = Variant::kLogits ? hole_row(r) : Row{};
      const Variant variant(params_, operands_, row);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = first + 8 * j + e;
          float& x = s[4 * j + 2 * r + e];
          x *= params_.variant.sm_scale;
          if constexpr (Variant::kLogits) x = variant.logits(x, row, Col{position(begin, c), begin + c});
        }
      }
    }
  }

  // The assembler moves a wait for products up into the softmax before it, which then waits for what it
  // should run beside (5% at head dim 128); the border of a basic block that cannot be removed keeps it in
  // place.
  JAXINFER_DEVICE void split_block() const {
    asm volatile(
        "{\n.reg .pred q;\nagain_%=: setp.ne.s32 q, %0, %1;\n@q bra done_%=;\nnanosleep.u32 32;\nbra "
        "again_%=;\n"
        "done_%=: }" ::"r"(params_.num_tokens),
        "r"(-1)
        : "memory");
  }

  const AttentionParams& params_;
  const VariantOperands& operands_;
  int cls_;
  char* memory_;
  ConsumerState& state_;
  ItemRows<Config::kPacked> rows_;
  WgmmaBarriers<Config> barriers_;
  int consumer_;
  RingCursor<Shared::kStages> k_slot_;
  RingCursor<Shared::kStages> v_slot_;
  // Of the item:
  int clear_begin_;  // all rows of the warp see columns [clear_begin, clear_end): see ColumnRange
  int clear_end_;
  WgmmaWeights<Type, kColumns, kPieces, kEarly> weights_;
  uint32_t p_[2 * kColumns];  // weights of the block whose product with V comes next
  float o_[4 * kPieces];
};

}  // namespace jaxinfer
