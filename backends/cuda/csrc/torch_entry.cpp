#include "torch_entry.hpp"

#include <mutex>
#include <vector>

namespace harli {

namespace {

// Process-wide because torch calls plain functions without a context.
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
    const std::lock_guard lock(it.mutex);
    std::erase_if(it.earlier, [&](const auto& before) { return before == space || before->live() == 0; });
    if (it.current != nullptr && it.current != space && it.current->live() > 0) it.earlier.push_back(it.current);
    it.current = std::move(space);
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
            owner = nullptr;
            const std::lock_guard lock(binding().mutex);
            for (const auto& space : binding().earlier) {
                if (space->owns(address)) owner = space;
            }
        }
        if (owner == nullptr) throw StateError("torch freed an address of no tensor space");
        owner->free(address, reinterpret_cast<Stream>(stream));
        const std::lock_guard lock(binding().mutex);
        std::erase_if(binding().earlier, [](const auto& space) { return space->live() == 0; });
    } catch (const std::exception& error) {
        remember(error.what());
    }
}
