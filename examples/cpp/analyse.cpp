// Weight bytes, activation bytes and multiply-adds of a TorchScript file, without Python:
//
//     analyse MODEL.pt 1,3,224,224
//
// Every operator of one run is observed. Convolutions, matrix products, LSTM layers and attention are counted from the
// shapes of their inputs. Other operators that look like a product, such as quantized ones, are listed as "uncounted"
// with their number of calls. The result of an operator is an activation unless its storage existed before.

#include <torch/script.h>

#include <ATen/record_function.h>

#include <cstdint>
#include <initializer_list>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

std::int64_t macs = 0;
std::int64_t activations = 0;
int products = 0;                      // operators counted or listed so far
std::map<std::string, int> uncounted;  // operator -> calls
std::unordered_set<const void*> known;
std::vector<at::Tensor> alive;  // keeps addresses from being used twice

void note(const at::Tensor& tensor) {
  if (known.insert(tensor.storage().unsafeGetStorageImpl()).second) {
    activations += static_cast<std::int64_t>(tensor.nbytes());
    alive.push_back(tensor);
  }
}

std::int64_t product(at::IntArrayRef sizes) {
  std::int64_t result = 1;
  for (const auto size : sizes) {
    result *= size;
  }
  return result;
}

// The call of an operator; inputs are only available before the operator runs.
struct Called : at::ObserverContext {
  std::vector<c10::IValue> inputs;
  std::int64_t macs = 0;  // these three as they were before the call
  int products = 0;
  std::map<std::string, int> uncounted;
};

int running = 0;  // depth of operators inside operators

// Whole layers in one operator: what they call themselves is only a part of their products.
bool is_layer(const std::string& name) {
  return name == "aten::_transformer_encoder_layer_fwd" || name == "aten::_native_multi_head_attention";
}

bool looks_like_product(const std::string& name) {
  for (const auto word : {"mm", "mv", "dot", "conv", "linear", "lstm", "gru", "rnn", "attention", "einsum"}) {
    if (name.find(word) != std::string::npos) {
      return name.find("upsample") == std::string::npos;  // upsample_bilinear2d
    }
  }
  return false;
}

std::optional<std::int64_t> macs_of(const std::string& name, const std::vector<c10::IValue>& inputs,
                                    const at::Tensor& result) {
  const auto tensor = [&](std::size_t position) { return inputs[position].toTensor(); };
  if (name == "aten::_convolution") {
    const bool transposed = inputs[6].toBool();  // each input element meets all weights of its channel
    return (transposed ? tensor(0).numel() : result.numel()) * product(tensor(1).sizes().slice(1));
  }
  if (name == "aten::mm" || name == "aten::bmm") {
    return result.numel() * tensor(0).size(-1);
  }
  if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::_addmm_activation") {
    return result.numel() * tensor(1).size(-1);
  }
  if (name == "aten::mkldnn_rnn_layer") {  // (length, batch, input) with the weights of input and hidden state
    return tensor(0).numel() / tensor(0).size(-1) * (tensor(1).numel() + tensor(2).numel());
  }
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu") {  // scores, and their product with the values
    return (tensor(0).numel() + result.numel()) * tensor(1).size(-2);
  }
  if (is_layer(name) && !tensor(0).is_nested()) {  // self-attention of (batch, length, width), and a network
    std::int64_t weights = 0;
    const bool is_attention = name == "aten::_native_multi_head_attention";
    for (const auto position : is_attention ? std::vector{5, 7} : std::vector{3, 5, 14, 16}) {
      weights += tensor(position).numel();
    }
    const auto length = tensor(0).size(1), width = tensor(0).size(2);
    return tensor(0).size(0) * length * (weights + 2 * length * width);
  }
  return std::nullopt;
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
  ++running;
  auto called = std::make_unique<Called>();
  const auto inputs = function.inputs();
  called->inputs.assign(inputs.begin(), inputs.end());
  called->macs = macs;
  called->products = products;
  called->uncounted = uncounted;
  return called;
}

void count(const std::string& name, const Called& called, const at::Tensor& result) {
  const auto found = macs_of(name, called.inputs, result);
  if (found) {
    macs = called.macs + *found;  // instead of the products inside it
    uncounted = called.uncounted;
  } else if (is_layer(name) || (looks_like_product(name) && products == called.products)) {
    ++uncounted[name];
  } else {
    return;
  }
  ++products;
}

void after(const at::RecordFunction& function, at::ObserverContext* context) {
  --running;
  const auto outputs = function.outputs();
  if (!outputs.empty() && outputs[0].isTensor() && outputs[0].toTensor().defined()) {
    count(function.name(), *static_cast<Called*>(context), outputs[0].toTensor());
  }
  for (const auto& value : outputs) {
    if (running == 0 && value.isTensor() && value.toTensor().defined()) {  // tensors inside operators are freed
      note(value.toTensor());
    }
  }
}

std::vector<std::int64_t> sizes_of(const std::string& text) {
  std::vector<std::int64_t> sizes;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    sizes.push_back(std::stoll(part));
  }
  return sizes;
}

}  // namespace

int main(int argc, const char* argv[]) {
  if (argc != 3) {
    std::cerr << "usage: analyse MODEL.pt SIZE, such as 1,3,224,224\n";
    return 2;
  }
  try {
    auto model = torch::jit::load(argv[1]);
    const auto input = torch::zeros(sizes_of(argv[2]));
    std::int64_t weights = 0;
    for (const auto& parameter : model.parameters()) {
      weights += static_cast<std::int64_t>(parameter.nbytes());
      known.insert(parameter.storage().unsafeGetStorageImpl());
    }
    for (const auto& buffer : model.buffers()) {
      known.insert(buffer.storage().unsafeGetStorageImpl());
    }
    known.insert(input.storage().unsafeGetStorageImpl());
    at::addGlobalCallback(
        at::RecordFunctionCallback(before, after).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
    const torch::NoGradGuard no_grad;
    model.forward({input});
    std::cout << "weights " << weights << "\nactivations " << activations << "\nmacs " << macs << "\n";
    for (const auto& [name, calls] : uncounted) {
      std::cout << "uncounted " << name << " " << calls << "\n";
    }
  } catch (const std::exception& error) {
    std::cerr << "error: " << std::string(error.what()).substr(0, 300) << "\n";
    return 1;
  }
  return 0;
}
