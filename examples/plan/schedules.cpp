#include <chevron/catalogue/catalogue.hpp>

#include "request.hpp"

namespace plan_program {

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  chevron::catalogue::for_each([&](auto const& one) { names.emplace_back(one.name); });
  return names;
}

std::vector<std::string> all_names() {
  std::vector<std::string> names = schedule_names();
  boost::hana::for_each(chevron::catalogue::evaluation, [&](auto const* one) { names.emplace_back(one->name); });
  return names;
}

chevron::plan plan_named(std::string const& name, chevron::shape size) { return chevron::catalogue::make_plan(name, size); }

}  // namespace plan_program
