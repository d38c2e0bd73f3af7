// What a producer of the warpgroup kernel tells consumers: the items of its CTA, one after the other, each
// with its rows of Q. K and V are brought by attention_wgmma_load.cuh.
#pragma once

#include "kernels/attention_wgmma_shared.cuh"

namespace jaxinfer {

// Of one warp. Its cursor's state is that of the item at hand.
template <class Config>
class WgmmaItems {
  using Shared = WgmmaShared<Config>;

 public:
  JAXINFER_DEVICE WgmmaItems(const AttentionParams& params, const TensorMaps& maps, char* memory,
                             const CursorState& state, int lane)
      : params_(params),
        maps_(maps),
        memory_(memory),
        barriers_{shared_address(memory + Shared::kBarriers)},
        shared_(shared_address(memory)),
        state_(state),
        lane_(lane) {}

  // Positions of the item's rows, for the consumers: when they come to the item, they have nothing else to
  // do.
  JAXINFER_DEVICE void read_rows_ahead() const {
    constexpr int kLine = 32;
    const int tokens = state_.item.flags & 0xffff;
    const int first = lane_ * kLine;
    if (first < tokens + kLine - 1)
      read_ahead(params_.q_pos + state_.item.token_begin + min(first, tokens - 1));
    if (lane_ == 31) read_ahead(params_.kv_offset + state_.item.bsr_row);
  }

  // The item, as it is bounded and cut into blocks, and Q. Rows of a warpgroup by themselves where tokens do
  // not straddle them, else the whole tile for all of them. The first copies come before the item is written,
  // which takes less time than they do (0.3 to 0.8% of 8 x 1024 causal tokens on an H200): bytes may land
  // before they are announced, as the arrival is still to come.
  JAXINFER_DEVICE void publish(int number, const Item& item, const BlockRange<Config>& blocks) {
    const bool has_blocks = blocks.count > 0;
    const int group = Config::kPacked ? forget(params_.group_divider.divisor) : 1;
    const int first_head = Config::kPacked ? state_.head * group : state_.head;
    const bool split = has_split_query<Config>(params_);
    const int parts = split ? Shared::kConsumers : 1;
    const int rows = split ? 64 : Config::kTile;
    const int tokens = Config::kPacked ? params_.group_divider.divide(rows) : rows;  // of a part
    for (int c = 0; c < parts; ++c) {
      const uint32_t full = barriers_.query_full(c);
      wait_query_empty(c, split, number);
      if (has_blocks && elect_lane()) {
#pragma unroll
        for (int p = 0; p < Shared::kPanelsQk; ++p) {
          copy_box(shared_ + Shared::kQuery + p * Shared::kQueryPanel + c * 64 * kPanelBytes, &maps_.q, full,
                   p * kPanelElements, first_head, state_.item.token_begin + c * tokens);
        }
      }
      __syncwarp();
      if (c == 0) write_slot(number, item, blocks);
      if (elect_lane()) {
        if (has_blocks) {
          arrive_expecting(full, Shared::kPanelsQk * tokens * group * kPanelBytes);
        } else {
          arrive(full);
        }
      }
      __syncwarp();
    }
  }
  JAXINFER_DEVICE void end(int number) {
    const bool split = has_split_query<Config>(params_);
    for (int c = 0; c < (split ? Shared::kConsumers : 1); ++c) {
      wait_query_empty(c, split, number);
      if (elect_lane()) {
        if (c == 0) item_slot(number).is_end = 1;
        arrive(barriers_.query_full(c));
      }
      __syncwarp();
    }
  }

 private:
  // By one lane, that whose arrival publishes it. Consumers that have left Q of the item two before this one
  // have left what was in the slot.
  JAXINFER_DEVICE void write_slot(int number, const Item& item, const BlockRange<Config>& blocks) const {
    if (elect_lane()) {
      ItemSlot& slot = item_slot(number);
      const int offset = blocks.count > 0 ? __ldg(params_.kv_offset + item.bsr_row) : 0;
      const int* const from = reinterpret_cast<const int*>(&state_);
      int* const to = reinterpret_cast<int*>(&slot.cursor);
      constexpr int kWords = sizeof(Item) / 4 + 2;  // the item, its head and its pass
#pragma unroll 5  // more at once would cost registers, fewer time: consumers may wait for this
      for (int i = 0; i < kWords; ++i) to[i] = from[i];
      slot.is_end = 0;
      slot.num_blocks = blocks.count;
      slot.first = blocks.first;
      slot.kv_begin = item.kv_begin;
      slot.kv_end = item.kv_end;
      slot.kv_offset = offset;
    }
    __syncwarp();
  }
  // Until the owners of part c have left Q of the item before `number`.
  JAXINFER_DEVICE void wait_query_empty(int c, bool split, int number) const {
    for (int owner = c; owner < (split ? c + 1 : Shared::kConsumers); ++owner) {
      wait_barrier(barriers_.query_empty(owner), ~number & 1);
    }
  }
  JAXINFER_DEVICE ItemSlot& item_slot(int number) const {
    return reinterpret_cast<ItemSlot*>(memory_ + Shared::kItems)[number % kItemSlots];
  }

  const AttentionParams& params_;
  const TensorMaps& maps_;
  char* memory_;
  WgmmaBarriers<Config> barriers_;
  uint32_t shared_;
  const CursorState& state_;
  int lane_;
};

}  // namespace jaxinfer
