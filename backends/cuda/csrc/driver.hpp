// The port to virtual memory and streams: what a GPU driver offers, and what a host can imitate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "call_ledger.hpp"
#include "process.hpp"

namespace harli {

using Address = uintptr_t;  // virtual
using Handle = uint64_t;    // physical memory
using Stream = uintptr_t;   // 0 is the default stream
using Event = uintptr_t;    // never 0

// Semantics are those of the CUDA driver's virtual memory management:
//   reserve   address space without memory behind it; touching it faults
//   create    physical memory, at first zero or anything
//   map       put a handle (whole) behind reserved addresses; still faults until set_access
//   release   give the handle up; the memory goes once no mapping uses it
// A handle may be mapped at several addresses at once (aliasing). Unmapping does not wait for running work.
// Each public call is counted, and can be made to fail, before the implementation sees it. A forked child shares the
// memory with its parent, so every call is refused there. Thread-safe.
class Driver {
public:
    virtual ~Driver() = default;
    Driver() = default;
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    virtual std::string name() const = 0;
    virtual bool fresh_memory_is_zero() const = 0;  // whether what create() gives holds zeros
    virtual size_t granularity() const = 0;  // bytes; sizes and addresses of mappings are multiples of it

    Address reserve(size_t bytes, size_t alignment) { return enter(Call::reserve), do_reserve(bytes, alignment); }
    Handle create(size_t bytes) { return enter(Call::create), do_create(bytes); }
    void map(Address at, size_t bytes, Handle handle) { enter(Call::map), do_map(at, bytes, handle); }
    void set_access(Address at, size_t bytes) { enter(Call::set_access), do_set_access(at, bytes); }
    void unmap(Address at, size_t bytes) { enter(Call::unmap), do_unmap(at, bytes); }
    void release(Handle handle) { enter(Call::release), do_release(handle); }
    void free(Address at, size_t bytes) { enter(Call::free), do_free(at, bytes); }

    Event create_event() { return enter(Call::event_create), do_create_event(); }
    void record(Event event, Stream stream) { enter(Call::event_record), do_record(event, stream); }
    bool query(Event event) { return enter(Call::event_query), do_query(event); }  // never waits
    void destroy(Event event) { enter(Call::event_destroy), do_destroy(event); }

    // Asynchronous, in stream order; bytes is even.
    void fill(Address at, uint16_t pattern, size_t bytes, Stream stream) {
        enter(Call::fill), do_fill(at, pattern, bytes, stream);
    }
    void copy(Address to, Address from, size_t bytes, Stream stream) {
        enter(Call::copy), do_copy(to, from, bytes, stream);
    }

    CallLedger& ledger() { return ledger_; }
    const CallLedger& ledger() const { return ledger_; }
    bool at_home() const { return home_.here(); }  // false in a forked child
    void require_home(const char* verb) const;     // throws StateError in a forked child

private:
    void enter(Call call);

    virtual Address do_reserve(size_t bytes, size_t alignment) = 0;
    virtual Handle do_create(size_t bytes) = 0;
    virtual void do_map(Address at, size_t bytes, Handle handle) = 0;
    virtual void do_set_access(Address at, size_t bytes) = 0;
    virtual void do_unmap(Address at, size_t bytes) = 0;
    virtual void do_release(Handle handle) = 0;
    virtual void do_free(Address at, size_t bytes) = 0;
    virtual Event do_create_event() = 0;
    virtual void do_record(Event event, Stream stream) = 0;
    virtual bool do_query(Event event) = 0;
    virtual void do_destroy(Event event) = 0;
    virtual void do_fill(Address at, uint16_t pattern, size_t bytes, Stream stream) = 0;
    virtual void do_copy(Address to, Address from, size_t bytes, Stream stream) = 0;

    CallLedger ledger_;
    HomeProcess home_;
};

}  // namespace harli
