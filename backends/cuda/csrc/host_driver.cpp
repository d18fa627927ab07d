#include "host_driver.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace harli {

namespace {

[[noreturn]] void fail(Call call, const std::string& why) {
    throw DriverError("driver call " + std::string(call_names[static_cast<size_t>(call)]) + " failed: " + why);
}

constexpr size_t most_bytes = size_t{1} << 46;  // more than the addresses of a process, and far from wrapping round

void* pointer(Address at) { return reinterpret_cast<void*>(at); }

// Reserved address space again, whatever was there.
bool make_reserved(Address at, size_t bytes) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap(pointer(at), bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED;
}

}  // namespace

HostDriver::HostDriver(size_t granularity_bytes) : granularity_(granularity_bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (!std::has_single_bit(granularity_) || granularity_ < page || granularity_ > most_bytes) {
        throw ConfigError("host driver: a granularity of " + std::to_string(granularity_) +
                          " bytes is no power of two of at least a page, " + std::to_string(page) + " bytes");
    }
    memory_ = memfd_create("harli", MFD_CLOEXEC);
    if (memory_ < 0) throw DriverError(std::string("host driver: memfd_create failed: ") + std::strerror(errno));
}

// Both are this process's own: in a forked child they leave the parent's memory as it is.
HostDriver::~HostDriver() {
    for (const auto& [at, bytes] : reservations_) munmap(pointer(at), bytes);
    close(memory_);
}

HostUse HostDriver::use() const {
    std::lock_guard lock(mutex_);
    return {reservations_.size(), chunks_.size(), mappings_.size(), streams_.events()};
}

void HostDriver::check_aligned(Call call, size_t value) const {
    if (value == 0 || value % granularity_ != 0) {
        fail(call, std::to_string(value) + " is no positive multiple of the granularity, " + std::to_string(granularity_));
    }
    if (value > most_bytes) fail(call, std::to_string(value) + " bytes are more than any address space has");
}

Address HostDriver::do_reserve(size_t bytes, size_t alignment) {
    check_aligned(Call::reserve, bytes);
    const size_t step = std::max(alignment, granularity_);
    if (!std::has_single_bit(step)) fail(Call::reserve, "the alignment is no power of two");
    std::lock_guard lock(mutex_);
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const got = mmap(nullptr, bytes + step, PROT_NONE, flags, -1, 0);
    if (got == MAP_FAILED) fail(Call::reserve, std::strerror(errno));
    const auto start = reinterpret_cast<Address>(got);
    const Address at = (start + step - 1) / step * step;
    if (at > start) munmap(got, at - start);
    if (start + step > at) munmap(pointer(at + bytes), start + step - at);
    reservations_.emplace(at, bytes);
    return at;
}

void HostDriver::do_free(Address at, size_t bytes) {
    std::lock_guard lock(mutex_);
    const auto found = reservations_.find(at);
    if (found == reservations_.end() || found->second != bytes) fail(Call::free, "no such reservation");
    const auto mapping = mappings_.lower_bound(at);
    if (mapping != mappings_.end() && mapping->first < at + bytes) fail(Call::free, "part of it is mapped");
    munmap(pointer(at), bytes);
    reservations_.erase(found);
}

Handle HostDriver::do_create(size_t bytes) {
    check_aligned(Call::create, bytes);
    std::lock_guard lock(mutex_);
    size_t offset = memory_bytes_;
    if (const auto hole = holes_.find(bytes); hole != holes_.end()) {
        offset = hole->second;
        holes_.erase(hole);
    } else {
        if (bytes > most_bytes - memory_bytes_) fail(Call::create, "out of memory");
        if (ftruncate(memory_, static_cast<off_t>(memory_bytes_ + bytes)) != 0) fail(Call::create, std::strerror(errno));
        memory_bytes_ += bytes;
    }
    chunks_.emplace(next_handle_, Chunk{offset, bytes, 0, false});
    return next_handle_++;
}

void HostDriver::do_release(Handle handle) {
    std::lock_guard lock(mutex_);
    const auto found = chunks_.find(handle);
    if (found == chunks_.end() || found->second.released) fail(Call::release, "no such handle");
    found->second.released = true;
    drop_if_unused(found);
}

void HostDriver::drop_if_unused(std::map<Handle, Chunk>::iterator chunk) {
    const Chunk& it = chunk->second;
    if (!it.released || it.mappings > 0) return;
    fallocate(memory_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(it.offset),
              static_cast<off_t>(it.bytes));
    holes_.emplace(it.bytes, it.offset);
    chunks_.erase(chunk);
}

void HostDriver::do_map(Address at, size_t bytes, Handle handle) {
    check_aligned(Call::map, bytes);
    std::lock_guard lock(mutex_);
    const auto chunk = chunks_.find(handle);
    if (chunk == chunks_.end() || chunk->second.released) fail(Call::map, "no such handle");
    if (chunk->second.bytes != bytes) fail(Call::map, "a handle is mapped whole");
    const auto after = reservations_.upper_bound(at);
    if (at % granularity_ != 0 || after == reservations_.begin()) fail(Call::map, "not a reserved, aligned address");
    const auto range = std::prev(after);
    if (bytes > range->second || at - range->first > range->second - bytes) fail(Call::map, "not within one reservation");
    const auto next = mappings_.lower_bound(at);
    const bool overlaps_next = next != mappings_.end() && next->first < at + bytes;
    const bool overlaps_last = next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > at;
    if (overlaps_next || overlaps_last) fail(Call::map, "part of the range is mapped already");
    if (mmap(pointer(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory_,
             static_cast<off_t>(chunk->second.offset)) == MAP_FAILED) {
        fail(Call::map, std::strerror(errno));
    }
    mappings_.emplace(at, Mapping{bytes, handle});
    ++chunk->second.mappings;
}

void HostDriver::do_set_access(Address at, size_t bytes) {
    check_aligned(Call::set_access, bytes);
    std::lock_guard lock(mutex_);
    Address covered = at;
    for (auto it = mappings_.find(at); it != mappings_.end() && it->first == covered && covered < at + bytes; ++it) {
        covered += it->second.bytes;
    }
    if (covered != at + bytes) fail(Call::set_access, "the range is not a run of whole mappings");
    if (mprotect(pointer(at), bytes, PROT_READ | PROT_WRITE) != 0) fail(Call::set_access, std::strerror(errno));
}

void HostDriver::do_unmap(Address at, size_t bytes) {
    std::lock_guard lock(mutex_);
    const auto found = mappings_.find(at);
    if (found == mappings_.end() || found->second.bytes != bytes) fail(Call::unmap, "no such mapping");
    if (!make_reserved(at, bytes)) fail(Call::unmap, std::strerror(errno));
    const auto chunk = chunks_.find(found->second.handle);
    mappings_.erase(found);
    --chunk->second.mappings;
    drop_if_unused(chunk);
}

void HostDriver::do_fill(Address at, uint16_t pattern, size_t bytes, Stream stream) {
    if (bytes % 2 != 0 || at % 2 != 0) fail(Call::fill, "an odd address or size");
    streams_.submit(stream, [at, pattern, bytes] {
        auto* const first = reinterpret_cast<uint16_t*>(at);
        std::fill(first, first + bytes / 2, pattern);
    });
}

void HostDriver::do_copy(Address to, Address from, size_t bytes, Stream stream) {
    streams_.submit(stream, [to, from, bytes] { std::memcpy(pointer(to), pointer(from), bytes); });
}

}  // namespace harli
