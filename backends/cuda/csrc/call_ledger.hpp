// How often each driver call was made, and which of the next ones are to fail or to wait (tests only).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "errors.hpp"

namespace harli {

enum class Call {
    reserve, create, map, set_access, unmap, release, free,
    event_create, event_record, event_query, event_destroy, fill, copy,
};

inline constexpr std::array<std::string_view, 13> call_names = {
    "reserve", "create", "map", "set_access", "unmap", "release", "free",
    "event_create", "event_record", "event_query", "event_destroy", "fill", "copy"};

class CallLedger {
public:
    // Note a call about to be made; throws DriverError instead if it was told to fail.
    void enter(Call call) {
        const auto kind = static_cast<size_t>(call);
        made_[kind].fetch_add(1, std::memory_order_relaxed);
        if (!armed_.load(std::memory_order_relaxed)) return;
        stall_if_told(call);
        fail_if_told(kind);
    }

    uint64_t made(Call call) const { return made_[static_cast<size_t>(call)].load(std::memory_order_relaxed); }

    // Let the nth call of this kind from now on (0 = the next) fail, and the times - 1 after it.
    void fail(Call call, int64_t nth, int64_t times) {
        const auto kind = static_cast<size_t>(call);
        last_[kind].store(nth + times - 1);
        first_[kind].store(nth);
        armed_.store(true);
    }

    // Let the next call of this kind take until go_on(), to see what others can do meanwhile.
    void stall(Call call) {
        const std::lock_guard lock(mutex_);
        to_stall_ = call;
        armed_.store(true);
    }
    bool stalled() const {
        const std::lock_guard lock(mutex_);
        return stalled_;
    }
    void go_on() {
        const std::lock_guard lock(mutex_);
        to_stall_.reset();
        stalled_ = false;
        gone_on_.notify_all();
    }

    void clear_faults() {
        go_on();
        armed_.store(false);
        for (size_t kind = 0; kind < made_.size(); ++kind) last_[kind].store(-1);
    }

private:
    void stall_if_told(Call call) {
        std::unique_lock lock(mutex_);
        if (to_stall_ != call) return;
        to_stall_.reset();
        stalled_ = true;
        gone_on_.wait(lock, [this] { return !stalled_; });
    }

    void fail_if_told(size_t kind) {
        if (last_[kind].load() < 0) return;
        last_[kind].fetch_sub(1);
        if (first_[kind].fetch_sub(1) <= 0) {
            throw DriverError("driver call " + std::string(call_names[kind]) + " failed: a fault was injected");
        }
    }

    std::array<std::atomic<uint64_t>, call_names.size()> made_{};
    std::array<std::atomic<int64_t>, call_names.size()> first_{};
    std::array<std::atomic<int64_t>, call_names.size()> last_ = minus_ones();
    std::atomic<bool> armed_{false};
    mutable std::mutex mutex_;
    std::condition_variable gone_on_;
    std::optional<Call> to_stall_;
    bool stalled_ = false;

    static std::array<std::atomic<int64_t>, call_names.size()> minus_ones() {
        return {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    }
};

}  // namespace harli
