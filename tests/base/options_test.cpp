// Enums with names, and options of a config.
#include "base/options.h"

#include <gtest/gtest.h>

namespace fsdp {
namespace {

enum class Fruit { kApple, kPear, kPlum };
constexpr auto enum_table(Fruit) {
  return std::to_array<EnumName>(
      {{"apple", "the usual one"}, {"pear"}, {"plum", "only in autumn"}});
}
using Names = std::vector<std::string>;

TEST(EnumNames, AreReadAsWritten) {
  for (Fruit fruit : {Fruit::kApple, Fruit::kPear, Fruit::kPlum})
    EXPECT_EQ(parse_enum<Fruit>(enum_name(fruit)), fruit);
  EXPECT_EQ(parse_enum<Fruit>("Pear"), std::nullopt);
  EXPECT_EQ(parse_enum<Fruit>(""), std::nullopt);
  EXPECT_EQ(enum_names<Fruit>(), (Names{"apple", "pear", "plum"}));
}

TEST(EnumField, TakesNamesAndLeavesTheFieldAloneOtherwise) {
  Fruit fruit = Fruit::kPear;
  EnumField field(fruit);
  EXPECT_EQ(field.name(), "pear");
  EXPECT_TRUE(field.set("plum"));
  EXPECT_EQ(fruit, Fruit::kPlum);
  for (const char* word : {"", "4", "plums", "Plum"}) EXPECT_FALSE(field.set(word)) << word;
  EXPECT_EQ(fruit, Fruit::kPlum);
  field.leave_out(1, 1);
  EXPECT_EQ(field.names(), Names{"pear"});
  EXPECT_FALSE(field.set("apple"));
  EXPECT_EQ(field.name(), "plum");  // a value it doesn't take has a name, too
}

TEST(EnumField, MayTakeANumberInstead) {
  OrNumber<Fruit> either;
  EnumField field(either);
  EXPECT_TRUE(either == Fruit::kApple);
  EXPECT_TRUE(field.set("12"));
  EXPECT_EQ(enum_name(either), "12");
  EXPECT_FALSE(either == Fruit::kApple);
  for (const char* word : {"1", "-2", "02", "2.0", "2 ", "1000001", "99999999999999999999"})
    EXPECT_FALSE(field.set(word)) << word;
  EXPECT_EQ(either.number, 12);
  EXPECT_TRUE(field.set("pear"));
  EXPECT_TRUE(either == Fruit::kPear);
}

TEST(OptionList, AddsTheHelpOfNamesToThatOfTheOption) {
  Fruit one{}, two{}, three{};
  OptionList list;
  list.section("basket", "What is in it");
  list.add("one", one, "What to eat");
  list.add("two", two, "", {.without_first = 1});
  list.add("three", three, "What to drink", {.without_first = 1, .without_last = 1});
  EXPECT_EQ(list.options[0].help, "What to eat; apple: the usual one; plum: only in autumn");
  EXPECT_EQ(list.options[1].help, "plum: only in autumn");
  EXPECT_EQ(list.options[2].help, "What to drink");
  EXPECT_EQ(list.options[2].name(), "basket.three");
}

TEST(Nearest, PrefersTheRightKeyOfAnotherSection) {
  double lr = 0, rate = 0;
  OptionList list;
  list.section("optim", "");
  list.add("lr", lr, "");
  list.add("learning_rate", rate, "");
  for (const char* name : {"lr", "train.lr", "optim.lrr"})
    EXPECT_EQ(nearest(list.options, name), &list.options[0]) << name;
  EXPECT_EQ(nearest(list.options, "optim.learningrate"), &list.options[1]);
  EXPECT_EQ(nearest(list.options, "xyzzyxyzzy"), nullptr);
  EXPECT_EQ(find(list.options, "optim.lr"), &list.options[0]);
  EXPECT_EQ(find(list.options, "lr"), nullptr);
}

}  // namespace
}  // namespace fsdp
