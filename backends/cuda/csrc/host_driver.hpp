// The driver port on any Linux machine: memfd pages mapped, aliased and remapped by mmap.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "driver.hpp"
#include "software_streams.hpp"

namespace harli {

// What is alive now; all zero after everything was given back.
struct HostUse {
    uint64_t reservations = 0;
    uint64_t handles = 0;  // released ones that are still mapped included
    uint64_t mappings = 0;
    uint64_t events = 0;
    bool operator==(const HostUse&) const = default;
};

// One memfd holds the physical memory of all handles, each a range of it. Reserved addresses are PROT_NONE, so that
// touching what is not mapped, or mapped without access, is a SIGSEGV as it is a fault on a GPU.
// granularity_bytes: a power of two, at least a page; the 2 MiB of a GPU by default in Python.
class HostDriver final : public Driver {
public:
    explicit HostDriver(size_t granularity_bytes);
    ~HostDriver() override;

    std::string name() const override { return "host"; }
    bool fresh_memory_is_zero() const override { return true; }
    size_t granularity() const override { return granularity_; }
    SoftwareStreams& streams() {
        require_home("use streams");  // their work would be done in the parent's memory
        return streams_;
    }
    HostUse use() const;

private:
    struct Chunk {
        size_t offset = 0;  // in the memfd
        size_t bytes = 0;
        size_t mappings = 0;
        bool released = false;
    };
    struct Mapping {
        size_t bytes = 0;
        Handle handle = 0;
    };

    Address do_reserve(size_t bytes, size_t alignment) override;
    Handle do_create(size_t bytes) override;
    void do_map(Address at, size_t bytes, Handle handle) override;
    void do_set_access(Address at, size_t bytes) override;
    void do_unmap(Address at, size_t bytes) override;
    void do_release(Handle handle) override;
    void do_free(Address at, size_t bytes) override;
    Event do_create_event() override { return streams_.create_event(); }
    void do_record(Event event, Stream stream) override { streams_.record(event, stream); }
    bool do_query(Event event) override { return streams_.query(event); }
    void do_destroy(Event event) override { streams_.destroy(event); }
    void do_fill(Address at, uint16_t pattern, size_t bytes, Stream stream) override;
    void do_copy(Address to, Address from, size_t bytes, Stream stream) override;

    void check_aligned(Call call, size_t value) const;
    void drop_if_unused(std::map<Handle, Chunk>::iterator chunk);

    mutable std::mutex mutex_;
    size_t granularity_;
    int memory_ = -1;
    size_t memory_bytes_ = 0;
    Handle next_handle_ = 1;
    std::map<Address, size_t> reservations_;
    std::map<Handle, Chunk> chunks_;
    std::multimap<size_t, size_t> holes_;  // bytes -> offset of ranges that no handle has
    std::map<Address, Mapping> mappings_;
    SoftwareStreams streams_;
};

}  // namespace harli
