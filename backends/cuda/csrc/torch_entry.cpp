#include "torch_entry.hpp"

#include <mutex>
#include <vector>

namespace harli {

namespace {

// Process-wide because torch calls plain functions without a context. A space is let go of without the mutex: if that is
// the last reference, Python's lock is waited for, whose holder may be waiting for the mutex.
struct Binding {
    std::mutex mutex;
    std::shared_ptr<TensorSpace> current;
    std::vector<std::shared_ptr<TensorSpace>> earlier;
    std::string last_error;
};

Binding& binding() {
    static auto* const only = new Binding;  // never destroyed: torch may free while the process exits
    return *only;
}

using Spaces = std::vector<std::shared_ptr<TensorSpace>>;

// Take those out of which torch has nothing any more; the caller has the mutex, and drops the result without it.
Spaces take_done(Spaces& spaces) {
    Spaces done;
    done.reserve(spaces.size());
    std::erase_if(spaces, [&done](auto& space) {
        if (space->live() > 0) return false;
        done.push_back(std::move(space));
        return true;
    });
    return done;
}

void remember(const char* error) noexcept {
    try {
        const std::lock_guard lock(binding().mutex);
        binding().last_error = error;
    } catch (const std::exception&) {  // no room for the text
    }
}

}  // namespace

void bind_torch_space(std::shared_ptr<TensorSpace> space) {
    Binding& it = binding();
    Spaces done;
    const std::lock_guard lock(it.mutex);  // goes before `done` does
    done = take_done(it.earlier);
    it.earlier.reserve(it.earlier.size() + 1);
    std::erase(it.earlier, space);
    std::swap(it.current, space);
    if (space != nullptr && space != it.current && space->live() > 0) it.earlier.push_back(space);
}

std::shared_ptr<TensorSpace> bound_torch_space() {
    Binding& it = binding();
    const std::lock_guard lock(it.mutex);
    return it.current;
}

std::string last_torch_error() {
    Binding& it = binding();
    const std::lock_guard lock(it.mutex);
    return it.last_error;
}

}  // namespace harli

void* harli_torch_malloc(ptrdiff_t size, int /*device*/, void* stream) {
    using namespace harli;
    try {
        const auto space = bound_torch_space();
        if (space == nullptr) throw StateError("torch asked for memory while no tensor space is bound");
        return reinterpret_cast<void*>(space->allocate(static_cast<size_t>(size), reinterpret_cast<Stream>(stream)));
    } catch (const std::exception& error) {
        remember(error.what());
        return nullptr;
    }
}

void harli_torch_free(void* pointer, ptrdiff_t /*size*/, int /*device*/, void* stream) {
    using namespace harli;
    const auto address = reinterpret_cast<Address>(pointer);
    try {
        auto owner = bound_torch_space();
        if (owner == nullptr || !owner->owns(address)) {
            owner.reset();
            const std::lock_guard lock(binding().mutex);
            for (const auto& space : binding().earlier) {
                if (space->owns(address)) owner = space;
            }
        }
        if (owner == nullptr) throw StateError("torch freed an address of no tensor space");
        owner->free(address, reinterpret_cast<Stream>(stream));
        Spaces done;
        const std::lock_guard lock(binding().mutex);  // goes before `done` and `owner` do
        done = take_done(binding().earlier);
    } catch (const std::exception& error) {
        remember(error.what());
    }
}
