"""The nodes that polars expressions may have in a saved workflow.

In polars' JSON, a node, a function or a data type with content is an object with one key, its name in polars' Rust
source (`Expr`, `FunctionExpr`, `DataType` and what these contain), which begins with a capital. The keys of its fields
begin with a small letter. Polars can run code only through a node that holds a function, a plan or a library; none of
these is in the list, wherever and however it is written. A new name is added after its content was looked up in that
source: no field of it, under any key or in any list, may be a `PlanCallback`, a `SpecialEq` of a function, a plan, or
the path of a library. So `ToStruct` is not here, whose field may be a function that names the fields.
"""

from __future__ import annotations

#: Nodes whose values are other ones each time.
RANDOM = frozenset({"Random", "Sample"})
#: Nodes that stand for columns which they do not name.
SELECTING = frozenset(
    """
    Selector SelectFields ByDType ByIndex ByName Matches AnyOf AllOf Union Difference ExclusiveOr Intersect Wildcard Nth
    """.split()
)
#: All that may be in a file. The nodes of `RANDOM` and `SELECTING` hold no code; `check` refuses them by name.
NODES = (
    RANDOM
    | SELECTING
    | frozenset(
        """
    AddBusinessDay Agg AggGroups Alias All Any Append ApproxQuantile ArgSort Array ArrayExpr Backward Base64Decode
    Bin Binary BinaryExpr Bitwise Boolean Business BusinessDayCount Cast CastTimeUnit Categorical Clip Column
    Combine ConcatExpr ConcatHorizontal ConcatVertical Contains ContainsAny ConvertTimeZone CorrCov Correlation
    Count CountMatches Covariance CumCount CumMax CumMin CumProd CumSum Cumulative Cut Date DateRange DateRanges
    Datetime DatetimeFunction DatetimeRange DatetimeRanges Decimal Diff Drop Duration Dyn EndsWith Entropy Enum Eval
    EwmMean EwmMeanBy EwmStd EwmSum EwmSumBy EwmVar Explode Extract ExtractGroups ExtractMany Field FieldByName
    FieldDataTypeByIndex FieldDataTypeByName FillNullWithStrategy Filter Find FindMany First FirstNonNull Float
    Float16 Float32 Float64 Format Forward Function Gather GatherEvery Get HasNulls Hash HexDecode Hist Implode
    InnerDataType Int Int128 Int16 Int32 Int64 Int8 IntRange IntRanges Interpolate IsBetween IsBusinessDay IsClose
    IsEmpty IsIn IsSorted Item Join JsonDecode KeepName Kurtosis Last LastNonNull LinearSpace LinearSpaces List
    ListExpr Literal Max Mean MeanHorizontal Median Min Mode NUnique Normalize Null OfExpr Over PadEnd PadStart Pow
    PrefixFields QCut Quantile Quantiles Range Rank Reinterpret RenameFields Replace ReplaceMany ReplaceStrict
    ReplaceTimeZone Reshape Rolling RollingExpr RollingExprBy Round RoundSF Scalar SearchSorted SelfDtype Series
    SetOperation SetSortedFlag Skew Slice Sort SortBy Specified Split SplitExact SplitN SplitRegex StartsWith Std
    Str String StringExpr Strptime Struct StructEval StructExpr StructWithFields SuffixFields Sum SumHorizontal
    TemporalExpr Ternary Time TimeRange TimeRanges TimeStamp To ToArray ToDecimal ToInteger ToString TopK TopKBy
    TotalDays TotalHours TotalMicroseconds TotalMilliseconds TotalMinutes TotalNanoseconds TotalSeconds Trigonometry
    Truncate UInt128 UInt16 UInt32 UInt64 UInt8 Unique ValueCounts Var Window WithTimeUnit WrapInArray WrapInList
    """.split()
    )
)
