// The extension module of chevron_pipelining. One rank is one Python process.

#include "errors.hpp"
#include "job.hpp"
#include "program.hpp"
#include "timeline.hpp"
#include "trainer.hpp"

namespace chevron_pipelining {
namespace {

/// A call that waits for other ranks: without the GIL, with this rank's GPU as the thread's current one, ended by Ctrl-C.
template <class Work>
auto waiting(job const& of, Work const& work) {
  interrupts::scope const ctrl_c(of.ctrl_c());
  auto const here = of.on_device();
  return in_chevron(work);
}

chevron::trainer_options options_of(py::kwargs const& given, bool weighed) {
  chevron::trainer_options out;
  out.seed = given["seed"].cast<std::uint64_t>();
  out.clip_grad_norm = given["clip_grad_norm"].cast<double>();
  if (given["skip_not_finite"].cast<bool>()) out.when_not_finite = chevron::not_finite::skip;
  if (!given["learning_rate"].is_none()) {
    out.learning_rate = [rate = own(given["learning_rate"])](long step) {
      return in_python([&] { return of(rate)(step).cast<double>(); });
    };
  }
  if (!weighed) out.loss_weight = [](chevron::batch const&) { return 1.0; };
  return out;
}

std::shared_ptr<pipeline> make_pipeline(std::shared_ptr<job> with, chevron::proved_program const& program, py::dict const& stages,
                                        py::object const& loss, bool weighed, py::object const& optimizer,
                                        py::kwargs const& given) {
  pipeline_setup setup{.program = program, .loss = own(loss), .weighed = weighed, .optimizer = own(optimizer)};
  setup.options = options_of(given, weighed);
  setup.options.device = with->device();
  for (auto const& [number, stage] : stages) {
    setup.stages[number.cast<int>()] = {own(stage.attr("submod")), own(stage.attr("forward")),
                                        stage.attr("recompute").cast<bool>(),
                                        stage.attr("tied").cast<std::vector<std::pair<std::string, std::string>>>()};
  }
  job const& of = *with;
  return waiting(of, [&] { return std::make_shared<pipeline>(with, std::move(setup)); });
}

py::dict step(pipeline& of, pipeline::arguments const& given) {
  auto const r = waiting(of.of(), [&] { return of.step(given); });
  using namespace py::literals;
  return py::dict("step"_a = r.step, "loss"_a = r.loss, "grad_norm"_a = r.grad_norm, "learning_rate"_a = r.learning_rate,
                  "clipped"_a = r.clipped, "skipped"_a = r.skipped, "samples"_a = r.samples, "seconds"_a = r.seconds,
                  "bubble"_a = r.bubble, "peak_in_flight"_a = r.peak_in_flight, "peak_memory"_a = r.memory.active,
                  "peak_reserved"_a = r.memory.reserved);
}

}  // namespace
}  // namespace chevron_pipelining

PYBIND11_MODULE(_binding, m) {
  using namespace chevron_pipelining;
  ask_for_queues();
  m.attr("no_nccl") = no_nccl;

  py::class_<chevron::proved_program>(m, "Program")
      .def(py::init([](std::string const& schedule, int ranks, int micro_batches, int chunks) {
             return in_chevron([&] { return program_of(schedule, ranks, micro_batches, chunks); });
           }),
           py::arg("schedule"), py::arg("ranks"), py::arg("micro_batches"), py::arg("chunks"))
      .def_property_readonly("ranks_of_stages", &ranks_of_stages)
      .def_property_readonly("name", [](chevron::proved_program const& p) { return std::string(p.view().plan.name); })
      .def_property_readonly("bubble", &planned_bubble)
      .def_property_readonly("ranks", [](chevron::proved_program const& p) { return p.view().plan.size.ranks; })
      .def_property_readonly("micro_batches", [](chevron::proved_program const& p) { return p.view().plan.size.micro_batches; })
      .def_property_readonly("slices", [](chevron::proved_program const& p) { return p.view().plan.size.slices; });

  py::class_<job, std::shared_ptr<job>>(m, "Job")
      .def(py::init([](std::optional<job::store> const& shared, std::string const& prefix, int rank, int world, int replicas,
                       int host, std::string const& master, double deadline, int gpu) {
             return in_chevron(
                 [&] { return std::make_shared<job>(shared, prefix, rank, world, replicas, host, master, deadline, gpu); });
           }),
           py::arg("store"), py::arg("prefix"), py::arg("rank"), py::arg("world"), py::arg("replicas"), py::arg("host"), py::arg("master"),
           py::arg("deadline"), py::arg("gpu"))
      .def("fail", [](job& of, std::string const& reason) { in_chevron([&] { return of.fail(reason), 0; }); })
      .def("close", [](job& of) { in_chevron([&] { return of.close(), 0; }); })
      .def_property_readonly("failed", &job::failed)
      .def_property_readonly("forked", &job::forked)
      .def_property_readonly("rank", &job::rank)
      .def_property_readonly("world", &job::world);

  py::class_<pipeline, std::shared_ptr<pipeline>>(m, "Pipeline")
      .def(py::init(&make_pipeline), py::arg("job"), py::arg("program"), py::arg("stages"), py::arg("loss"), py::arg("weighed"),
           py::arg("optimizer"))
      .def("step", &step)
      .def("forward",
           [](pipeline& of, pipeline::arguments const& given) { waiting(of.of(), [&] { return of.forward(given), 0; }); })
      .def("evaluate",
           [](pipeline& of, pipeline::arguments const& given) { return waiting(of.of(), [&] { return of.evaluate(given); }); })
      .def("timeline",
           [](pipeline& of, std::string const& path) { waiting(of.of(), [&] { return write_timeline(of, path), 0; }); })
      .def("svg", [](pipeline& of) { return in_chevron([&] { return drawn_here(of); }); })
      .def("trace", [](pipeline const& of) { return in_chevron([&] { return of.trace(); }); })
      .def_property(
          "next_step", [](pipeline const& of) { return in_chevron([&] { return of.next_step(); }); },
          [](pipeline& of, long step) { in_chevron([&] { return of.next_step(step), 0; }); });
}
